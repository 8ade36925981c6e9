"""The engine: transformers' Trainer on Accelerate, with the batches, the loss and the optimizer of an experiment.

What differs from Trainer: a batch is a function of its step, so that a resumed run skips nothing; the loss is the sum
over counted tokens divided by their number in the whole step, whatever the number of processes and micro-batches; Q and
K may learn at a rate of their own; several processes may share the model as FSDP2 does, on CPUs too. Checkpoints are
`qkform.training.checkpoints`, and nothing is printed.
"""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PrinterCallback, Trainer, TrainingArguments

from qkform import surgery
from qkform.dynamics.processes import summed
from qkform.errors import ExperimentError, TrainingError
from qkform.training import states
from qkform.training.experiment import Experiment
from qkform.training.objectives import IGNORED

_SCHEDULES = {"linear": "linear", "cosine": "cosine", "constant": "constant_with_warmup"}


class MicroBatches:
    """The micro-batches of this process from a step on, as Trainer iterates over a dataloader; it has no length."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        engine = self._engine
        return iter(
            engine.batches.stream(
                engine.state.global_step,
                engine.experiment.steps,
                rank=engine.args.process_index,
                world_size=engine.args.world_size,
                accumulation=engine.experiment.accumulation,
            )
        )


class Engine(Trainer):
    """A Trainer for one experiment.

    model      of `build_model`; under fsdp it is sharded in place
    batches    `qkform.training.data.Batches` of the whole step's sequences; its objective has the loss
    args       `arguments(experiment, folder)`
    """

    model: Any
    optimizer: Any
    compute_loss_func: Any

    def __init__(
        self, experiment: Experiment, model: nn.Module, batches: Any, args: TrainingArguments
    ) -> None:
        self.experiment = experiment
        self.batches = batches
        self.last_loss = math.nan
        self.last_inputs: Any = None
        self.plain: nn.Module | None = None  # the whole model, on the first process, where `model` is sharded
        self._parts: list[Tensor] = []  # of the loss of the step, one per micro-batch
        self._norms: Tensor | None = (
            None  # of the step's gradients, each parameter's, before they are clipped
        )
        self._counted: Tensor | None = None  # tokens of the step
        self._named: list[tuple[str, nn.Parameter]] = []
        self._restored: dict[str, Any] = {}
        _refuse_unequal(experiment, args.world_size)
        super().__init__(model=model, args=args, compute_loss_func=batches.objective.loss)
        self.remove_callback(PrinterCallback)
        surgery.param_groups(
            model, lr=experiment.lr, qk_lr_ratio=experiment.qk_lr_ratio
        )  # splits what is fused
        torch.manual_seed(experiment.seed + 2**32 * args.process_index)  # dropout is each process's own
        self.sharded = experiment.parallel == "fsdp" and args.world_size > 1
        if self.sharded:
            if args.should_save:
                self.plain = copy.deepcopy(model).cpu()
            shard_(model, args.device)
            self.is_distributed_loading_by_transformers = True  # to Trainer: it is sharded, leave that alone

    # What Trainer asks for

    def get_train_dataloader(self) -> Any:
        return MicroBatches(self)

    def create_optimizer(self, model: Any = None) -> Any:
        if self.optimizer is None:
            e = self.experiment
            groups = surgery.param_groups(
                self.model, lr=e.lr, qk_lr_ratio=e.qk_lr_ratio, weight_decay=e.weight_decay
            )
            if e.optimizer == "adamw":
                # Fused: of small models on a CPU a fortieth of a step. Not with a loss scale: the kernel itself passes
                # over an update that overflowed, and Accelerate would let the schedule go on.
                fused = e.precision != "fp16"
                betas = e.betas[0], e.betas[1]
                self.optimizer = torch.optim.AdamW(groups, lr=e.lr, betas=betas, eps=e.eps, fused=fused)
            else:
                self.optimizer = torch.optim.SGD(groups, lr=e.lr, momentum=e.momentum)
        return self.optimizer

    def _get_num_items_in_batch(self, batch_samples: list[Any], device: Any) -> Tensor:
        """Counted tokens of the whole step: of all processes and micro-batches."""
        self._counted = summed(sum(batch["labels"].ne(IGNORED).sum() for batch in batch_samples).to(device))
        return self._counted

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """This process's part of the step's loss, times the number of processes: gradients are averaged over them."""
        labels = inputs.pop("labels")
        loss = self.compute_loss_func(model(**inputs), labels, num_items_in_batch)
        self._parts.append(loss.detach())
        return loss * self.args.world_size

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        self.last_inputs = inputs
        loss = super().training_step(model, inputs, num_items_in_batch)
        if (
            self.accelerator.sync_gradients and self.accelerator.scaler is None
        ):  # a scaler passes over such steps
            norms = [torch.linalg.vector_norm(states.own(p.grad)).float() for _, p in self._learning()]
            self._norms = torch.stack(norms)
        return loss

    def _clip_grad_norm(self, model: Any) -> Any:
        """As Trainer clips, by the norms that `training_step` has taken already where these are of whole gradients."""
        if self.sharded or self.accelerator.scaler is not None or self._norms is None:
            return super()._clip_grad_norm(model)  # type: ignore[no-untyped-call]
        total = torch.linalg.vector_norm(self._norms)
        clip = torch.nn.utils.clip_grads_with_norm_
        clip([parameter for _, parameter in self._learning()], self.args.max_grad_norm, total)
        return total

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """The model has its weights already: they are put in before it is wrapped or sharded."""

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is not None:
            self._restored = states.load(Path(checkpoint))
            states.restore_(self._restored, self.optimizer, self.lr_scheduler, self.accelerator.scaler)

    def _load_scaler(self, checkpoint: str | None) -> None:
        """Done with the optimizer."""

    def _load_rng_state(self, checkpoint: str | None) -> None:
        if checkpoint is not None:
            states.restore_random_(self._restored, self.args.process_index)

    def train(self, *args: Any, **kwargs: Any) -> Any:
        with warnings.catch_warnings():
            if self.sharded:  # outputs are views of what is sharded; nothing here writes into them
                warnings.filterwarnings(
                    "ignore", "FSDP2-wrapped module .* returned a view tensor", UserWarning
                )
            return super().train(*args, **kwargs)

    def floating_point_ops(self, inputs: Any) -> int:
        return 0  # counting parameters takes longer than a small layer

    @contextmanager
    def _defer_fsdp_gradient_reduction(self) -> Iterator[None]:
        self.model.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            self.model.set_requires_gradient_sync(True)

    # What the run asks for

    def settle(self, stop: bool = False) -> tuple[bool, bool]:
        """Before an update: `last_loss` becomes the step's loss, mean over its counted tokens of all processes, nats.
        NaN where not one counts.

        Returns whether any process wants to stop, and whether the update can be made: loss and gradients are finite in
        all of them. All take part.
        """
        loss = torch.stack(self._parts).sum().double()
        self._parts.clear()
        norm = loss.new_zeros(()) if self._norms is None else torch.linalg.vector_norm(self._norms)
        said = summed(torch.stack([loss, loss.new_tensor(float(stop)), (~torch.isfinite(norm)).double()]))
        self.last_loss, stops, breaks = said.tolist()
        sound = math.isfinite(self.last_loss) and not breaks
        if self._counted is not None and not self._counted:
            self.last_loss = math.nan
        return stops > 0, sound

    def broken_gradients(self) -> list[str]:
        """Parameters whose gradient in this step has no finite norm in some process. All take part."""
        if self._norms is None:
            return []
        broken = summed((~torch.isfinite(self._norms)).double()).tolist()
        return [name for (name, _), one in zip(self._learning(), broken, strict=True) if one]

    def broken_weights(self) -> list[str]:
        """Parameters with a value that is not finite in some process. All take part."""
        named = list(self.model.named_parameters())
        broken = [~torch.isfinite(states.own(parameter)).all() for _, parameter in named]
        return [
            name
            for (name, _), one in zip(named, summed(torch.stack(broken).double()).tolist(), strict=True)
            if one
        ]

    def _learning(self) -> list[tuple[str, nn.Parameter]]:
        """The parameters that have a gradient."""
        if not self._named:  # once: to walk through the modules takes a hundredth of a small model's step
            self._named = list(self.model.named_parameters())
        return [(name, p) for name, p in self._named if p.grad is not None]

    def training_state(self) -> dict[str, Any]:
        """Optimizer, schedule, loss scale and random numbers. All processes take part."""
        return states.gathered(self.optimizer, self.lr_scheduler, self.accelerator.scaler)

    def held_out_loss(self) -> float:
        """Mean loss of the held-out tokens, nats, in eval mode without gradients. All processes take part."""
        model, rank, world = self.model_wrapped, self.args.process_index, self.args.world_size
        size = max(self.experiment.batch_size // (self.experiment.accumulation * world), 1)
        what = {"batch": size, "limit": self.experiment.held_out}
        batches = self.batches.held_out(**what, rank=rank, world_size=world)
        total = torch.zeros(2, dtype=torch.float64, device=self.args.device)
        was_training = model.training
        model.eval()
        try:
            with torch.no_grad():
                for _ in range(self.batches.held_out_rounds(**what, world_size=world)):
                    batch = next(batches, None)
                    counts = batch is not None
                    if batch is None:  # every process as often, for shards to be gathered
                        batch = next(self.batches.held_out(**what))
                    batch = self._prepare_inputs(batch)
                    labels = batch.pop("labels")
                    number = labels.ne(IGNORED).sum()
                    loss = self.compute_loss_func(model(**batch), labels, number)
                    total += counts * torch.stack([loss.double() * number, number.double()])
        finally:
            model.train(was_training)
        total = summed(total)
        if not total[1]:
            raise TrainingError(
                f"none of the {self.experiment.held_out} held-out sequences has a token that counts: mask_rate is "
                f"{self.experiment.mask_rate:g}; choose a larger one, or more of held_out"
            )
        return float(total[0] / total[1])

    def whole_model(self) -> nn.Module | None:
        """The model as one process has it, to be saved: on the first process; None on others. All take part."""
        if not self.sharded:
            return self.model if self.args.should_save else None
        places = dict(self.plain.named_parameters()) if self.plain is not None else {}
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                full = states.whole(parameter)
                if places:
                    places[name].copy_(full)
        return self.plain


def arguments(experiment: Experiment, folder: str) -> TrainingArguments:
    """The arguments of Trainer for an experiment."""
    gpu = torch.cuda.is_available()
    if experiment.precision == "fp16" and not gpu:
        raise ExperimentError("precision: fp16 needs a GPU, and there is none; fp32 or bf16 would work")
    return TrainingArguments(
        output_dir=folder,
        max_steps=experiment.steps,
        per_device_train_batch_size=1,  # the batches have their size
        gradient_accumulation_steps=experiment.accumulation,
        learning_rate=experiment.lr,
        lr_scheduler_type=_SCHEDULES[experiment.schedule],
        warmup_steps=experiment.warmup_steps,
        max_grad_norm=experiment.clip,
        seed=experiment.seed,
        bf16=experiment.precision == "bf16",
        fp16=experiment.precision == "fp16",
        torch_compile=experiment.compile,
        use_cpu=not gpu,
        ddp_find_unused_parameters=False,
        ignore_data_skip=True,  # the batches begin where they are asked to
        logging_strategy="no",
        logging_nan_inf_filter=False,  # a loss that is none is an error here
        save_strategy="no",
        eval_strategy="no",
        report_to=list(experiment.report_to) or "none",
        disable_tqdm=True,
        log_level="error",
        remove_unused_columns=False,
    )


def shard_(model: nn.Module, device: torch.device) -> None:
    """Shard a model over all processes as FSDP2 does: every layer of its longest list, and the rest as one."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(device.type, (torch.distributed.get_world_size(),))
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    for layer in max(lists, key=len, default=nn.ModuleList()):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)


def _refuse_unequal(experiment: Experiment, world_size: int) -> None:
    if experiment.batch_size % (world_size * experiment.accumulation):
        raise ExperimentError(
            f"batch_size: {experiment.batch_size} sequences of a step cannot be shared equally by {world_size} "
            f"processes with {experiment.accumulation} micro-batches each"
        )
