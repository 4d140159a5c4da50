"""Which adapters take a part out of the base when they are made, as exporter and server must both know.

By the beginning of PEFT's `init_lora_weights` (0.21, peft/tuners/lora/layer.py). What is left of the base and
the adapter together are the weights of the training, so that a merge of them is right; the adapter alone is
wrong on the exchange's base.
"""

RESIDUAL_STARTS = ("pissa", "olora")
# ... and so it should be of these, which nobody has tried here: they need data or a quantised base.
UNTRIED_STARTS = ("corda", "loftq", "lora_ga")
