from bapo_megatron.api import Run as Run
from bapo_megatron.api import evaluate as evaluate
from bapo_megatron.api import load_config as load_config
from bapo_megatron.api import run as run

__version__: str
