import logging

logging.getLogger("matplotlib").setLevel(logging.ERROR)  # it warns of a home folder that cannot be written
