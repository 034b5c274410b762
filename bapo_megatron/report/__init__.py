"""The report page of a run, and the comparison of several. Start at `page.render_run`."""

import logging

logging.getLogger("matplotlib").setLevel(logging.ERROR)  # it warns of a home folder that cannot be written
