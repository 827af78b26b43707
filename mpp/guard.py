"""Which updates are applied: none whose loss or gradient is not finite on any process; none far off, if so asked."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

LOOK_EVERY = 50  # updates between looks at what an accelerator counted: each look waits for it
MEMORY = 100  # updates that the usual gradient norm is a mean of
WARM = 20  # updates before there is a usual norm
LOUD = 10.0  # times the usual norm: told, where no limit is set


@dataclass(frozen=True)
class Unusual:
    """An update that was left out, or clipped from far above the usual norm; ids are of this process's images."""

    step: int
    kind: str
    """not finite, or spike"""
    norm: float
    usual: float
    own_loss_is_finite: bool
    ids: list[int]

    def row(self, process: int) -> dict[str, Any]:
        """As unusual_updates.jsonl holds it."""
        numbers = {"gradient_norm": self.norm, "usual_norm": self.usual, "own_loss_is_finite": self.own_loss_is_finite}
        return {"step": self.step, "kind": self.kind, "process": process, **numbers, "ids": self.ids}


@dataclass
class _Seen:
    """What is known of one update, in part still on the device."""

    step: int
    ids: list[Tensor] = field(default_factory=list)
    finite: list[Tensor] = field(default_factory=list)
    verdict: Tensor | None = None


class Guard:
    """Judges gradients on the device, and looks every now and then at how it judged.

    limit: updates whose norm is above so many times the usual one are left out; None: such are told, and applied.
    """

    def __init__(self, device: torch.device, limit: float | None):
        self.limit, self.is_cpu = limit, device.type == "cpu"
        self.usual, self.applied = torch.zeros((), device=device), torch.zeros((), device=device)
        self.pending: list[_Seen] = []
        self.now = _Seen(0)
        self.streak = list[int]()  # the last updates in a row that were not finite
        self.skipped, self.spikes = 0, 0  # since `counted`

    def sound(self, loss: Tensor, ids: Tensor) -> Tensor:
        """The loss (0-dim) of a micro-batch, whose gradient is NaN where it is not finite itself: a gradient is
        averaged over processes, so one knows of all. ids: int64 (b,), on the CPU."""
        finite = loss.detach().isfinite()
        self.now.ids.append(ids)
        self.now.finite.append(finite)
        return loss * torch.where(finite, 1.0, torch.nan)

    def judge(self, step: int, norm: Tensor) -> Tensor:
        """Whether this update must be left out, 1.0 or 0.0 on the device. norm: 0-dim, of the averaged gradient."""
        bad, warm = ~norm.isfinite(), self.applied >= WARM
        highest = torch.where(warm, self.usual * (self.limit or LOUD), torch.inf)
        spike = ~bad & (norm > highest)
        out = bad | spike if self.limit else bad
        self.now.step, self.now.verdict = step, torch.stack([bad.float(), spike.float(), norm, self.usual])
        self.applied = self.applied + (~out).float()
        mean = self.usual + (torch.minimum(norm, highest) - self.usual) / self.applied.clamp(1, MEMORY)
        self.usual = torch.where(out, self.usual, mean)
        self.pending.append(self.now)
        self.now = _Seen(0)
        return out.float()

    @property
    def is_due(self) -> bool:
        """Whether to look now; on a CPU, where nothing waits, always."""
        return self.is_cpu or len(self.pending) >= LOOK_EVERY

    def look(self) -> list[Unusual]:
        """What was unusual since the last look, the same steps on every process; waits for the device."""
        if not self.pending:
            return []
        verdicts = torch.stack([seen.verdict for seen in self.pending if seen.verdict is not None]).tolist()
        found = []
        for seen, (bad, spike, norm, usual) in zip(self.pending, verdicts, strict=True):
            self.streak = [*self.streak, seen.step] if bad else []
            self.skipped += bool(bad or (spike and self.limit))
            self.spikes += bool(spike)
            if bad or spike:
                finite = bool(torch.stack(seen.finite).all())
                kind = "not finite" if bad else "spike"
                found.append(Unusual(seen.step, kind, norm, usual, finite, torch.cat(seen.ids).tolist()))
        self.pending.clear()
        return found

    def counted(self) -> dict[str, int]:
        """For a line of metrics.jsonl, since the last one; after a look."""
        counts = {"skipped_updates": self.skipped, "gradient_spikes": self.spikes}
        self.skipped, self.spikes = 0, 0
        return counts

    def state(self) -> dict[str, Any]:
        """Exact in JSON; after a look."""
        return {
            "usual": self.usual.item(),
            "applied": self.applied.item(),
            "streak": list(self.streak),
            "skipped": self.skipped,
            "spikes": self.spikes,
        }

    def load_state(self, state: dict[str, Any]) -> None:
        self.usual.fill_(state["usual"])
        self.applied.fill_(state["applied"])
        self.streak, self.skipped, self.spikes = list(state["streak"]), state["skipped"], state["spikes"]


def told(updates: Sequence[dict[str, Any]], limit: float | None) -> list[str]:
    """Lines for a person, one for each unusual update; updates: rows of all processes."""
    lines = []
    for step in sorted({row["step"] for row in updates}):
        rows = [row for row in updates if row["step"] == step]
        first, own = rows[0], [row["process"] for row in rows if not row["own_loss_is_finite"]]
        if first["kind"] == "spike":
            done = "left out" if limit else "applied, clipped to optim.clip if that is set"
            norms = f"gradient norm {first['gradient_norm']:.3g}, usually {first['usual_norm']:.3g}"
            lines.append(f"step {step:,}: {norms}; {done}")
        else:
            of = f"loss of process {', '.join(map(str, own))}" if own else "gradient"
            lines.append(f"step {step:,}: the {of} is not finite; left out")
    return lines
