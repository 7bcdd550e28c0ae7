"""A whole training step: microbatches, loss, backward, clipping, and the optimizer's update."""

# Why: docs/design/gradients.md, "An optimizer steps on shards"
# Why: docs/design/gradients.md, "The next step's first gather is launched by the update"

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_

from compiled_fsdp.compat.modules import tree_flatten, tree_unflatten
from compiled_fsdp.compat.optim import has_hooks, step_with_hooks, step_without_hooks
from compiled_fsdp.compiler.options import Options
from compiled_fsdp.frontend.fsdp_module import FSDPModule
from compiled_fsdp.frontend.gradient_methods import units_of
from compiled_fsdp.frontend.optimizer_hooks import forget_gathered
from compiled_fsdp.optim.compiled import CompiledUpdate
from compiled_fsdp.optim.local import on_shards, treats_elements_alone
from compiled_fsdp.optim.norm import norm_of_gradients
from compiled_fsdp.reporting.compile_log import COMPILE_LOG, UpdateReport
from compiled_fsdp.runtime.context import RUNTIME

log = logging.getLogger(__name__)


class TrainStep:
    """A training step of a sharded model, called with a batch::

        fully_shard(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
        step = TrainStep(model, optimizer, lambda model, x, y: F.cross_entropy(model(x), y), max_norm=1.0)
        for x, y in batches:
            loss = step(x, y)  # forward, backward, clipping and the update
            scheduler.step()

    It gives the parameters and the optimizer's state that this loop gives, bit for bit::

        loss_fn(model, x, y).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    and takes less time: the model and its loss are compiled as one function, the norm and the optimizer work on this
    rank's shards and not on DTensors, and the first gather of the next step is launched as soon as its shards are
    updated.

    Args:
        model: a module to which ``fully_shard`` or ``replicate`` was applied.
        optimizer: any optimizer of the model's parameters. SGD, Adam, AdamW and torch's other optimizers that treat
            each element by itself work on shards. Others (Adafactor, Muon, LBFGS without a closure, your own) step
            as they do without ``TrainStep``.
        loss_fn: called with the model and one microbatch; returns the loss, a tensor of shape [].
        max_norm: the gradients' largest norm over all ranks; None for no clipping.
        norm_type: the p of that norm, as for ``torch.nn.utils.clip_grad_norm_``.
        microbatches: into how many parts of equal size a batch is divided, along the first dimension of each tensor in
            it. The loss is their mean.
        reduce: with several microbatches, whether gradients are reduced after the "last" one, which sends less, or
            after "each", which holds no full gradients in between.
        scaler: for float16. The step scales the loss, and leaves the update out if a gradient is not finite.
        compile_update: whether clipping and the optimizer's step are compiled code, too, which reads and writes each
            shard once. Adam and its relatives then compute their bias corrections in float32, as with
            ``torch.compile(optimizer.step)``, so results differ from the loop's by rounding.
        options: those of ``torch.compile(model, backend="compiled_fsdp", options=...)``; ``codegen`` and ``inductor``
            are those of the update, too.

    Attributes:
        norm: the gradients' norm in the last step, before clipping: a tensor of shape []; None without ``max_norm``.

    Raises:
        ValueError: the model has no sharded parameter, or an argument has no meaning; ``compile_update`` with an
            optimizer that does not work on shards.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        loss_fn: Callable[..., Tensor],
        *,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        microbatches: int = 1,
        reduce: Literal["last", "each"] = "last",
        scaler: torch.amp.GradScaler | None = None,
        compile_update: bool = False,
        options: Options | Mapping[str, Any] | None = None,
    ) -> None:
        if not _sharded_modules(model):
            raise ValueError("compiled_fsdp: TrainStep needs a sharded model. Call fully_shard(model) before.")
        if microbatches < 1:
            raise ValueError(f"compiled_fsdp: TrainStep: 'microbatches' must be at least 1, but got {microbatches!r}.")
        if reduce not in ("last", "each"):
            raise ValueError(f"compiled_fsdp: TrainStep: 'reduce' takes 'last' or 'each', but got {reduce!r}.")
        self.model, self.optimizer, self.scaler = model, optimizer, scaler
        self.norm: Tensor | None = None
        self._max_norm, self._norm_type = max_norm, norm_type
        self._count, self._defers = microbatches, microbatches > 1 and reduce == "last"
        given = Options.parse(options)
        self._update = Update(optimizer)
        if compile_update:
            if not self._update.on_shards:
                raise ValueError(
                    "compiled_fsdp: TrainStep(compile_update=True) compiles the optimizers of torch.optim that treat "
                    f"each element by itself (SGD, Adam, AdamW, ...), but {type(optimizer).__name__} may not do so. "
                    "Leave 'compile_update' out."
                )
            self._update.compiled = CompiledUpdate(optimizer, given.codegen, given.inductor, self._report_update)
        # a CUDA graph cannot take a gather that is in flight when it is replayed
        ahead = not given.inductor.get("triton.cudagraphs", False)
        compile_with: Any = torch.compile  # Any, because its annotation takes dictionaries only
        self._loss = compile_with(
            lambda *args, **kwargs: loss_fn(model, *args, **kwargs),
            backend="compiled_fsdp",
            options=replace(given, gathers_ahead=ahead),
        )
        where = "this rank's shards" if self._update.on_shards else "DTensors, because it may not treat elements alone"
        name = type(optimizer).__name__
        how = " as compiled code" if compile_update else ""
        log.info("the step has the graphs of forward and backward; then %s works on %s%s", name, where, how)

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        """Train on one batch.

        Args:
            args, kwargs: this rank's batch, which ``loss_fn`` gets after the model. With several microbatches, tensors
                in it are divided, and everything else is the same in each microbatch.

        Returns: the detached loss; with several microbatches, the mean of their losses.

        Raises:
            ValueError: a tensor cannot be divided into the microbatches.

        After any error the gradients of this step are dropped, so that the next one begins anew.
        """
        losses = []
        try:
            with self._reducing_last() as reduce_now:
                for number, (own_args, own_kwargs) in enumerate(self._divided(args, kwargs)):
                    reduce_now(number == self._count - 1)
                    losses.append(self._backward(own_args, own_kwargs))
            self._end()
        except BaseException:
            self._forget()
            raise
        return losses[0] if self._count == 1 else torch.stack(losses).mean()

    # ---- forward and backward ----------------------------------------------------------------------------------------
    def _backward(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor:
        loss = self._loss(*args, **kwargs)
        part = loss if self._count == 1 else loss / self._count
        (part if self.scaler is None else self.scaler.scale(part)).backward()
        return loss.detach()

    @contextlib.contextmanager
    def _reducing_last(self) -> Iterator[Callable[[bool], None]]:
        """Yields a function that says whether the next microbatch reduces; at the end, all do again."""
        modules = _sharded_modules(self.model) if self._defers else []

        def reduce_now(whether: bool) -> None:
            for module in modules:
                module.set_requires_gradient_sync(whether, recurse=False)

        try:
            yield reduce_now
        finally:
            reduce_now(True)

    def _report_update(self, params: Sequence[Tensor], moved: int) -> None:
        """Let ``explain`` know a graph of the update."""
        numbers = {id(p.param): p.param_id for unit in units_of(self.model) for p in unit.parameters}
        ids = frozenset(numbers[id(param)] for param in params if id(param) in numbers)
        name = type(self.optimizer).__name__
        COMPILE_LOG.updates.append(UpdateReport(name, ids, moved))

    def _forget(self) -> None:
        """Drop the gradients of a step that failed, those of its earlier microbatches, too."""
        for module in _sharded_modules(self.model):
            module.reset_iter_state()
        self.model.zero_grad()

    def _divided(self, args: Any, kwargs: Any) -> Iterator[tuple[Any, Any]]:
        if self._count == 1:
            return iter([(args, kwargs)])
        leaves, spec = tree_flatten((args, kwargs))
        for leaf in leaves:
            if isinstance(leaf, Tensor) and (leaf.ndim == 0 or leaf.shape[0] % self._count):
                raise ValueError(
                    f"compiled_fsdp: TrainStep(microbatches={self._count}) divides each tensor of a batch along its "
                    f"first dimension, but one has the shape {tuple(leaf.shape)}. Pass what is no part of the batch by "
                    "way of 'loss_fn', and leave out the rows that remain."
                )
        parts = [leaf.chunk(self._count) if isinstance(leaf, Tensor) else [leaf] * self._count for leaf in leaves]
        return (tree_unflatten(list(own), spec) for own in zip(*parts, strict=True))

    def _end(self) -> None:
        """Clip, update, and drop the gradients."""
        params = [param for group in self.optimizer.param_groups for param in group["params"]]
        if self.scaler is not None:
            self.scaler.unscale_(self._update)  # type: ignore[arg-type]  # it takes it for an optimizer
        if self._max_norm is not None:
            grads = [grad for param in self.model.parameters() if (grad := param.grad) is not None]
            self.norm = norm_of_gradients(grads, self._norm_type)
            self._update.clip = self._max_norm, self.norm
        if self.scaler is None:
            self._update.step()
        else:
            self.scaler.step(self._update)  # type: ignore[arg-type]
            self.scaler.update()
        for param in params:
            param.grad = None


def _sharded_modules(model: nn.Module) -> list[FSDPModule]:
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


class Update:
    """Clipping and the optimizer's step, as the end of a training step. ``GradScaler`` takes it for an optimizer."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self.on_shards = treats_elements_alone(optimizer)
        # The largest norm and the norm of the gradients that are there; None for no clipping.
        self.clip: tuple[float, Tensor] | None = None
        self.compiled: CompiledUpdate | None = None

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.optimizer.param_groups

    def step(self) -> None:
        """Clip the gradients that are there, and update the parameters."""
        params = [param for group in self.param_groups for param in group["params"]]
        forget_gathered(params)
        if self.compiled is not None and not self.compiled.has_too_many_graphs:
            self._step_compiled(self.compiled, params)
            return
        if not self.on_shards:
            self._clip(params)
            self.optimizer.step()
            RUNTIME.prefetcher.launch_next_forward()
            return
        with on_shards(self.optimizer) as plain:
            self._clip(list(plain.values()))
            first = [plain[p.param] for p in RUNTIME.prefetcher.next_forward() if p.param in plain]
            if first and not has_hooks(self.optimizer):
                self._step_in_two(first, [tensor for tensor in plain.values() if tensor.grad is not None])
            else:
                self.optimizer.step()
                RUNTIME.prefetcher.launch_next_forward()

    def _step_compiled(self, compiled: CompiledUpdate, params: Sequence[Tensor]) -> None:
        if has_hooks(self.optimizer):  # they see clipped gradients before the whole update, and parameters behind it
            self._clip(params)
            step_with_hooks(self.optimizer, lambda: compiled.step(params))
            RUNTIME.prefetcher.launch_next_forward()
        else:
            step_with_hooks(self.optimizer, lambda: self._compiled_in_two(compiled, params))

    def _compiled_in_two(self, compiled: CompiledUpdate, params: Sequence[Tensor]) -> None:
        early = {parameter.param for parameter in RUNTIME.prefetcher.next_forward()}.intersection(params)
        for part in (early, set(params) - early):
            if part:
                compiled.step(part, self.clip)
                RUNTIME.prefetcher.launch_next_forward()

    def _clip(self, params: Sequence[Tensor]) -> None:
        if self.clip is not None:
            clip_grads_with_norm_(params, *self.clip)

    def _step_in_two(self, first: Sequence[Tensor], params: Sequence[Tensor]) -> None:
        """Update ``first``, launch the next step's gather of them, and update the others while it is on its way."""
        early = set(first)
        later = {param: param.grad for param in params if param not in early}
        for param in later:
            param.grad = None
        self.optimizer.step()
        RUNTIME.prefetcher.launch_next_forward()
        for param in first:
            param.grad = None
        for param, grad in later.items():
            param.grad = grad
        step_without_hooks(self.optimizer)
