"""Make a small EXAONE 4.0 of random weights with the demo's tokenizer; compare its log-probs with transformers'."""

import torch
import transformers
from exaone4 import FAMILY

from bapo_megatron.assets import demo_model_path
from bapo_megatron.engines.embedded.model import Model

tokenizer = transformers.AutoTokenizer.from_pretrained(demo_model_path())
config = transformers.Exaone4Config(
    vocab_size=len(tokenizer),
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=512,
    sliding_window=None,
    layer_types=["full_attention"] * 2,
    bos_token_id=None,
    eos_token_id=tokenizer.eos_token_id,
)
torch.manual_seed(0)
theirs = transformers.Exaone4ForCausalLM(config)
with torch.no_grad():
    for parameter in theirs.parameters():  # norms too, which start as ones
        parameter.add_(0.1 * torch.randn_like(parameter))
theirs.save_pretrained("tiny-exaone4")
tokenizer.save_pretrained("tiny-exaone4")

ids = torch.randint(len(tokenizer), (40,))
ours = Model.from_pretrained("tiny-exaone4", max_len=40, own=FAMILY)
with torch.no_grad():
    wanted = theirs(ids[None]).logits[0, :-1].log_softmax(-1).gather(1, ids[1:, None])[:, 0]
    print(f"largest difference: {(ours.score(ids, 1, 1)[0] - wanted).abs().max():.1e}")
