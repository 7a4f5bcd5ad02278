"""The frameworks themselves on two ranks: they train, save, and go on as if nothing had happened.

Each is skipped where its package is missing: ``pip install '.[frameworks]'``.
"""

from __future__ import annotations

import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Dataset

import espresso
from benchmarks import exchange
from tests.workers import run_ranks

STEPS, BREAK = 6, 3
AUTOMATIC_STEPS = 40
SETTINGS: dict[str, Any] = {"timeout_s": 30.0, "offload_threads": 1, "ranks_per_node": 1}
QUICK: dict[str, Any] = {
    **SETTINGS,
    "warmup_steps": 3,
    "profile_steps": 2,
    "race_steps": 3,
    "race_rounds": 1,
    "decide_by": 0,
}
"""Automatic mode that has decided after some 20 steps."""
TORCHRUN = {"TORCHELASTIC_RUN_ID": "tests", "TORCHELASTIC_RESTART_COUNT": "0", "TORCHELASTIC_MAX_RESTARTS": "0"}


def needs(package: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(find_spec(package) is None, reason=f"{package} is not installed")


@needs("lightning")
@pytest.mark.slow
def test_lightning() -> None:
    everybody = results_of(lightning)
    for results in everybody:
        for how in ("callback", "strategy"):
            whole, resumed, forgotten, logged, num_parts, epoch = results[how]
            assert whole == everybody[0][how][0], "replicas differ"
            assert resumed == whole, how
            assert forgotten != resumed, "the residuals made no difference"
            assert logged["espresso/residual_norm"] > 0
            assert 0 < logged["espresso/bytes_sent"] < logged["espresso/bytes_raw"]
            assert logged["espresso/steps"] == STEPS
            assert num_parts == 840
            assert epoch == 0
        assert results["callback"][0] == results["strategy"][0]


@needs("lightning")
@pytest.mark.slow
def test_lightning_with_nothing_chosen() -> None:
    everybody = results_of(lightning_automatic)
    for results in everybody:
        for how in ("callback", "strategy"):
            digest_, decided, losses, steps, exchanges, again = results[how]
            assert digest_ == everybody[0][how][0], "replicas differ"
            assert decided
            assert losses[-1] < losses[0] / 2
            assert steps == sorted(set(steps)), "a step's figures are logged once"
            assert exchanges == AUTOMATIC_STEPS, "batches that only accumulate are not exchanged"
            assert again == AUTOMATIC_STEPS, "what a test read is not what the next fit goes on from"


@needs("accelerate")
@pytest.mark.slow
def test_accelerate() -> None:
    everybody = results_of(accelerate, init=True)
    for whole, resumed, forgotten in everybody:
        assert resumed == whole == everybody[0][0]
        assert forgotten != whole, "the residuals made no difference"


@needs("transformers")
@pytest.mark.slow
def test_transformers() -> None:
    for whole, resumed, forgotten, half_there, killed, logged in results_of(transformers):
        assert resumed == whole
        assert forgotten != whole, "the residuals made no difference"
        assert half_there == forgotten, "what one rank lacks no rank goes on from"
        assert killed == forgotten, "nor from what was not saved to the end"
        assert 0 < logged["espresso/bytes_sent"] < logged["espresso/bytes_raw"]


@needs("transformers")
@pytest.mark.slow
def test_transformers_with_nothing_chosen() -> None:
    everybody = results_of(transformers_automatic)
    for digest_, decided, losses, exchanges, reported, epoch, is_saved in everybody:
        assert digest_ == everybody[0][0], "replicas differ"
        assert decided
        assert losses[-1] < losses[0] / 2
        assert exchanges == [AUTOMATIC_STEPS, 2 * AUTOMATIC_STEPS], "a second train() goes on with the same state"
        assert reported == [float(step) for step in range(1, AUTOMATIC_STEPS + 1)]
        assert epoch == 1
        assert not is_saved, "only the model was asked for"


def test_no_framework_is_imported_by_itself() -> None:
    import subprocess
    import sys

    code = (
        "import sys, espresso; espresso.register; print({'lightning', 'accelerate', 'transformers'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout == "set()\n"


# -- scenarios, on two ranks -----------------------------------------------------------------------


def results_of(scenario: Any, init: bool = False) -> list[Any]:
    folder = tempfile.mkdtemp()
    outcomes = run_ranks(scenario, 2, folder, deadline_s=200, init=init, environment=TORCHRUN)
    return [outcome.value for outcome in outcomes]


compressed = exchange.uniform("comp > flat.allgather > dec", "efsignsgd", partition_bytes=0)
"""Everything by signs, from the first step on."""


class Rows(Dataset[torch.Tensor]):
    """The same on every rank, in order: a sampler deals them out."""

    def __init__(self, count: int = 4 * 2 * STEPS) -> None:
        self._rows = torch.randn(count, 40, generator=torch.Generator().manual_seed(7))

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> torch.Tensor:
        return self._rows[index]


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(40, 300), nn.Tanh(), nn.Linear(300, 5))


def digest(module: nn.Module | None) -> str:
    assert module is not None
    return exchange.digest(module.parameters())


def lightning_parts() -> tuple[Any, Any]:
    """A module and a logger; the framework is imported on the ranks alone."""
    import lightning.pytorch as pl
    from lightning.pytorch.loggers import Logger

    class Model(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = net()
            self.losses: list[float] = []

        def training_step(self, batch: torch.Tensor, _: int) -> torch.Tensor:
            loss: torch.Tensor = self.net(batch).square().mean()
            self.losses.append(loss.item())
            return loss

        def test_step(self, batch: torch.Tensor, batch_idx: int) -> None:
            self.log("loss", self.net(batch).square().mean(), sync_dist=True)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    class Memory(Logger):
        name = version = "memory"  # type: ignore[assignment]

        def __init__(self) -> None:
            super().__init__()
            self.figures: dict[str, float] = {}
            self.steps: list[int | None] = []

        def log_hyperparams(self, *_: Any, **__: Any) -> None:
            pass

        def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
            if "espresso/steps" in metrics:
                self.figures = metrics
                self.steps.append(step)

    return Model, Memory


def lightning(rank: int, folder: str) -> dict[str, Any]:
    import lightning.pytorch as pl

    from espresso.integrations.lightning import EspressoCallback, EspressoStrategy

    Model, Memory = lightning_parts()

    class Saving(pl.Callback):
        """After the first epoch. Lightning's own resume in the middle of one is not exact."""

        def __init__(self, path: Path | None) -> None:
            self.path = path

        def on_train_epoch_end(self, trainer: pl.Trainer, *_: Any) -> None:
            if self.path is not None and trainer.current_epoch == 0:
                trainer.save_checkpoint(self.path)

    def trained(how: str, save: Path | None = None, path: Path | None = None, forget: bool = False) -> tuple[str, Any]:
        given = {"strategy": compressed, **SETTINGS}
        adapter: Any = EspressoCallback(**given) if how == "callback" else EspressoStrategy(**given)
        if forget:
            adapter._exchange.load = lambda *_: None
        memory, model = Memory(), Model()
        trainer = pl.Trainer(
            accelerator="cpu",
            devices=2,
            strategy="ddp" if how == "callback" else adapter,
            callbacks=[*([adapter] if how == "callback" else []), Saving(save)],
            max_epochs=2,
            log_every_n_steps=1,
            logger=memory,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        loader = torch.utils.data.DataLoader(Rows(4 * 2 * BREAK), batch_size=4)
        trainer.fit(model, loader, ckpt_path=None if path is None else str(path))
        return digest(model), memory.figures

    results, forgotten = {}, ""
    for how in ("callback", "strategy"):
        path = Path(folder) / f"{how}.ckpt"
        whole, logged = trained(how, save=path)
        resumed, _ = trained(how, path=path)
        forgotten = forgotten or trained(how, path=path, forget=True)[0]
        saved = torch.load(path, weights_only=False)["espresso"]
        results[how] = (whole, resumed, forgotten, logged, len(saved["parts"]), saved["epoch"])
    dist.destroy_process_group()
    return results


def lightning_automatic(rank: int, folder: str) -> dict[str, Any]:
    import lightning.pytorch as pl

    from espresso.integrations.lightning import EspressoCallback, EspressoStrategy

    Model, Memory = lightning_parts()
    results: dict[str, Any] = {}
    for how in ("callback", "strategy"):
        adapter: Any = EspressoCallback(**QUICK) if how == "callback" else EspressoStrategy(**QUICK)
        memory, model, path = Memory(), Model(), f"{folder}/{how}.ckpt"
        trainer = pl.Trainer(
            accelerator="cpu",
            devices=2,
            strategy="ddp" if how == "callback" else adapter,
            callbacks=[adapter] if how == "callback" else [],
            max_steps=AUTOMATIC_STEPS,
            accumulate_grad_batches=2,
            gradient_clip_val=1.0,
            log_every_n_steps=1,
            logger=memory,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        loader = torch.utils.data.DataLoader(Rows(4 * 2 * 2 * AUTOMATIC_STEPS), batch_size=4)

        def state_of(adapter: Any = adapter, how: str = how) -> espresso.EspressoState:
            state = adapter.state if how == "callback" else adapter.espresso
            assert isinstance(state, espresso.EspressoState)
            return state

        trainer.fit(model, loader)
        first = state_of()
        exchanges = first.metrics()["espresso/steps"]
        trainer.save_checkpoint(path)
        result = (digest(model), first.decided, model.losses, memory.steps, exchanges)
        trainer.test(model, torch.utils.data.DataLoader(Rows(16), batch_size=4), ckpt_path=path, verbose=False)
        trainer.fit_loop.epoch_loop.max_steps = 2 * AUTOMATIC_STEPS
        trainer.fit_loop.max_epochs = 2
        trainer.fit(model, loader)
        assert state_of() is not first
        results[how] = (*result, state_of().metrics()["espresso/steps"])
    dist.destroy_process_group()
    return results


def accelerate(rank: int, folder: str) -> tuple[str, str, str]:
    import accelerate as hf

    accelerator = hf.Accelerator(cpu=True)

    def trained(steps: range, name: str = "", *, forget: bool = False) -> str:
        accelerator.free_memory()
        accelerator._custom_objects.clear()
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        prepared, optimizer = accelerator.prepare(model, optimizer)
        assert isinstance(prepared, DistributedDataParallel)
        with espresso.register(prepared, strategy=compressed, **SETTINGS) as state:
            accelerator.register_for_checkpointing(state)
            if name:
                saved = state.state_dict()
                accelerator.load_state(f"{folder}/{name}")
                if forget:
                    state.load_state_dict(saved)
            rows = Rows()
            for step in steps:
                optimizer.zero_grad()
                batch = torch.stack([rows[8 * step + 4 * rank + at] for at in range(4)])
                accelerator.backward(prepared(batch).square().mean())
                optimizer.step()
            if len(steps) == BREAK and not name:
                accelerator.save_state(f"{folder}/half")
        return digest(prepared)

    whole = trained(range(STEPS))
    trained(range(BREAK))
    rest = range(BREAK, STEPS)
    return whole, trained(rest, "half"), trained(rest, "half", forget=True)


def transformers_parts(folder: str, **given: Any) -> tuple[Any, dict[str, Any]]:
    """Arguments, and what else a trainer takes."""
    import transformers as hf

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = net()

        def forward(self, rows: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"loss": self.net(rows).square().mean()}

    arguments = {
        "per_device_train_batch_size": 4,
        "logging_steps": 1,
        "learning_rate": 0.1,
        "lr_scheduler_type": "constant",
        "optim": "sgd",
        "max_grad_norm": 0.0,
        "use_cpu": True,
        "ddp_backend": "gloo",
        "report_to": "none",
        "disable_tqdm": True,
        "remove_unused_columns": False,
        "dataloader_pin_memory": False,
    }

    def collate(rows: list[torch.Tensor]) -> dict[str, torch.Tensor]:
        return {"rows": torch.stack(rows)}

    made = hf.TrainingArguments(output_dir=folder, **{**arguments, **given})
    return made, {"model": Model(), "data_collator": collate, "train_dataset": Rows()}


def transformers(rank: int, folder: str) -> tuple[str, str, str, str, str, dict[str, float]]:
    import transformers as hf

    from espresso.integrations.transformers import FOLDER, EspressoCallback

    def trained(name: str, steps: int, resume: str | None = None, *, forget: bool = False) -> tuple[str, Any]:
        given: dict[str, Any] = {"strategy": compressed, **SETTINGS}
        callback = EspressoCallback(resume_from=f"{folder}/nowhere" if forget else resume, **given)
        arguments, parts = transformers_parts(f"{folder}/{name}", max_steps=steps, save_steps=BREAK)
        trainer = hf.Trainer(args=arguments, callbacks=[callback], **parts)
        trainer.train(resume_from_checkpoint=resume)
        return digest(trainer.model), trainer.state.log_history

    whole, history = trained("whole", STEPS)
    half = f"{folder}/whole/checkpoint-{BREAK}"
    written_last = Path(half) / FOLDER / ".metadata"
    assert written_last.exists()
    resumed, _ = trained("resumed", STEPS, half)
    forgotten, _ = trained("forgotten", STEPS, half, forget=True)
    half_there, _ = trained("half there", STEPS, half, forget=rank == 1)
    if rank == 0:
        written_last.unlink()
    dist.barrier()
    killed, _ = trained("killed", STEPS, half)
    logged = next(row for row in history if "espresso/bytes_sent" in row)
    dist.destroy_process_group()
    return whole, resumed, forgotten, half_there, killed, logged


def transformers_automatic(
    rank: int, folder: str
) -> tuple[str, bool, list[float], list[float], list[float], Any, bool]:
    import transformers as hf

    from espresso.integrations.transformers import FOLDER, EspressoCallback

    reported: list[float] = []

    class Reporter(hf.TrainerCallback):
        """As TensorBoard's, given behind ours."""

        def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if "loss" in kwargs["logs"]:
                reported.append(kwargs["logs"]["espresso/steps"])

    callback = EspressoCallback(**QUICK)
    arguments, parts = transformers_parts(
        folder,
        num_train_epochs=2,
        gradient_accumulation_steps=2,
        max_grad_norm=1.0,
        save_strategy="epoch",
        save_only_model=True,
    )
    parts["train_dataset"] = Rows(4 * 2 * AUTOMATIC_STEPS)
    trainer = hf.Trainer(args=arguments, callbacks=[callback, Reporter()], **parts)
    exchanges, losses = [], []
    state = None
    for _ in range(2):
        trainer.train()
        state = callback.state
        assert state is not None
        exchanges.append(state.metrics()["espresso/steps"])
        losses += [row["loss"] for row in trainer.state.log_history if "loss" in row]
    assert state is not None
    epoch = state.state_dict()["epoch"]
    is_saved = any(Path(folder).glob(f"checkpoint-*/{FOLDER}"))
    result = (
        digest(trainer.model),
        state.decided,
        losses,
        exchanges,
        reported[:AUTOMATIC_STEPS],
        epoch,
        is_saved,
    )
    state.close()
    dist.destroy_process_group()
    return result
