"""The training job: settings, sharded model, SFT, and a publication every n steps."""
