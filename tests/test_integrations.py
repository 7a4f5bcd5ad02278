"""The frameworks themselves on two ranks: they train, save, and go on as if nothing had happened.

Each is skipped where its package is missing: ``pip install 'espresso-ddp[frameworks]'``.
"""

from __future__ import annotations

import hashlib
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
from espresso.strategies import Choice, Cluster, CompressorSpec, Strategy, TensorSpec, parse_option
from tests.workers import run_ranks

STEPS, BREAK = 6, 3
SETTINGS: dict[str, Any] = {"timeout_s": 30.0, "offload_threads": 1, "ranks_per_node": 1}
TORCHRUN = {"TORCHELASTIC_RUN_ID": "tests", "TORCHELASTIC_RESTART_COUNT": "0", "TORCHELASTIC_MAX_RESTARTS": "0"}


def needs(package: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(find_spec(package) is None, reason=f"{package} is not installed")


@needs("lightning")
@pytest.mark.slow
def test_lightning() -> None:
    for results in results_of(lightning):
        for how in ("callback", "strategy"):
            whole, resumed, forgotten, logged, num_parts = results[how]
            assert resumed == whole, how
            assert forgotten != resumed, "the residuals made no difference"
            assert logged["espresso/residual_norm"] > 0
            assert 0 < logged["espresso/bytes_sent"] < logged["espresso/bytes_raw"]
            assert logged["espresso/steps"] == STEPS
            assert num_parts == 840
        assert results["callback"][0] == results["strategy"][0]


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
    for whole, resumed, forgotten, logged in results_of(transformers):
        assert resumed == whole
        assert forgotten != whole, "the residuals made no difference"
        assert 0 < logged["espresso/bytes_sent"] < logged["espresso/bytes_raw"]


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


def compressed(tensors: tuple[TensorSpec, ...], cluster: Cluster) -> Strategy:
    """Everything by signs, from the first step on."""
    option = parse_option("comp > flat.allgather > dec")
    return Strategy.uniform(tensors, cluster, Choice(option, CompressorSpec("efsignsgd")), partition_bytes=0)


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


def digest(module: nn.Module) -> str:
    sha = hashlib.sha256()
    for parameter in module.parameters():
        sha.update(parameter.detach().numpy().tobytes())
    return sha.hexdigest()[:16]


def lightning(rank: int, folder: str) -> dict[str, Any]:
    import lightning.pytorch as pl
    from lightning.pytorch.loggers import Logger

    from espresso.integrations.lightning import EspressoCallback, EspressoStrategy

    class Model(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = net()

        def training_step(self, batch: torch.Tensor, _: int) -> torch.Tensor:
            return self.net(batch).square().mean()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    class Memory(Logger):
        name = version = "memory"  # type: ignore[assignment]
        figures: dict[str, float] = {}  # noqa: RUF012

        def log_hyperparams(self, *_: Any, **__: Any) -> None:
            pass

        def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
            self.figures = metrics

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
            adapter._exchange.load = lambda body: None
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
        num_parts = len(torch.load(path, weights_only=False)["espresso"]["parts"])
        results[how] = (whole, resumed, forgotten, logged, num_parts)
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


def transformers(rank: int, folder: str) -> tuple[str, str, str, dict[str, float]]:
    import transformers as hf

    from espresso.integrations.transformers import FOLDER, EspressoCallback

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = net()

        def forward(self, rows: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"loss": self.net(rows).square().mean()}

    def trained(name: str, steps: int, resume: str | None = None, *, forget: bool = False) -> tuple[str, Any]:
        given: dict[str, Any] = {"strategy": compressed, **SETTINGS}
        callback = EspressoCallback(resume_from=f"{folder}/nowhere" if forget else resume, **given)
        arguments = hf.TrainingArguments(
            output_dir=f"{folder}/{name}",
            per_device_train_batch_size=4,
            max_steps=steps,
            save_steps=BREAK,
            logging_steps=1,
            learning_rate=0.1,
            lr_scheduler_type="constant",
            optim="sgd",
            max_grad_norm=0.0,
            use_cpu=True,
            ddp_backend="gloo",
            report_to=[],
            disable_tqdm=True,
            remove_unused_columns=False,
            dataloader_pin_memory=False,
        )
        collate = lambda rows: {"rows": torch.stack(rows)}  # noqa: E731
        trainer = hf.Trainer(Model(), arguments, data_collator=collate, train_dataset=Rows(), callbacks=[callback])
        trainer.train(resume_from_checkpoint=resume)
        return digest(trainer.model), trainer.state.log_history

    whole, history = trained("whole", STEPS)
    half = f"{folder}/whole/checkpoint-{BREAK}"
    assert (Path(half) / FOLDER / ".metadata").exists()
    resumed, _ = trained("resumed", STEPS, half)
    forgotten, _ = trained("forgotten", STEPS, half, forget=True)
    logged = next(row for row in history if "espresso/bytes_sent" in row)
    dist.destroy_process_group()
    return whole, resumed, forgotten, logged
