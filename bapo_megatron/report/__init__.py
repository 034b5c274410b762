"""The report page of a run, and the comparison of several. Start at `page.render_run`."""
