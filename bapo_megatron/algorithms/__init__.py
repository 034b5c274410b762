"""Losses, advantages and clip bounds, in pure torch. Start at `clip_bounds.search_bounds`, then `losses.LossInputs`."""
