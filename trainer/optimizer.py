"""One optimizer step: AdamW over the trained parameters, gradient clipping, and the learning rate."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import get_scheduler

from .settings import OptimizerSettings, ScheduleSettings

# transformers' names (optimization.py, SchedulerType)
_SCHEDULERS = {"constant": "constant_with_warmup", "linear": "linear", "cosine": "cosine"}


class Optimizer:
    """AdamW with its schedule; `step` is collective."""

    def __init__(
        self, parameters: Iterable[nn.Parameter], settings: OptimizerSettings, schedule: ScheduleSettings
    ) -> None:
        self._parameters = list(parameters)
        self._max_grad_norm = settings.max_grad_norm
        self._adamw = torch.optim.AdamW(
            self._parameters,
            lr=settings.lr,
            betas=settings.betas,
            eps=settings.eps,
            weight_decay=settings.weight_decay,
        )
        self._scheduler = get_scheduler(
            _SCHEDULERS[schedule.kind],
            self._adamw,
            num_warmup_steps=schedule.num_warmup_steps,
            num_training_steps=schedule.num_steps,
        )

    @property
    def lr(self) -> float:
        """What the next step takes."""
        return float(self._scheduler.get_last_lr()[0])

    def step(self) -> float:
        """Clip, update, forget the gradients; the norm before clipping, over all ranks."""
        norm = nn.utils.clip_grad_norm_(self._parameters, self._max_grad_norm)
        self._adamw.step()
        self._scheduler.step()
        self._adamw.zero_grad()
        return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)
