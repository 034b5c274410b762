"""The built-in losses. Each is one class with its settings, function, traits and update rule.

The configuration reads these files, in the order of their names, and takes each class that fixes a `name`. So they do
not import torch: functions use the methods of `LossInputs` and of tensors.

    clipped          BAPO, GRPO
    policy_gradient  REINFORCE, VESPO, and the masks IPO, DPPO, KPop, SAO, FlashREINFORCE
    rivals           GSPO, GMPO, CISPO, SAPO, M2PO
    selecting        Clip-Cov, KL-Cov, the mask by entropy
    supervised       maximum likelihood
"""
