"""The built-in losses, each one class: its settings, its function, its traits and its update rule.

The configuration reads these files, in the order of their names, and takes each class that fixes a `name`. So they
import no torch: functions use the methods of `LossInputs` and of tensors.

    clipped     BAPO, GRPO
    rivals      GSPO, GMPO, CISPO, SAPO, M2PO
    supervised  maximum likelihood
"""
