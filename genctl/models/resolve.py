"""Resolve a model name to a local folder: a built-in checkpoint, a folder, the Hub's cache, or a download.

Honours HF_HOME, HF_HUB_CACHE, HF_HUB_OFFLINE, HF_ENDPOINT and HF_TOKEN (which never appears in a message).
"""

from __future__ import annotations

import errno
import os
import re
import shlex
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from genctl.errors import GenctlError, ModelError, UsageError, cannot_read, nearest, reason_of, without_secrets
from genctl.models import check, runtime_choice
from genctl.models.config_limits import context_of
from genctl.models.libraries import OnEvent, bar_class, brief
from genctl.models.weights import shown
from genctl.params import Runtime

BUILTIN = Path(__file__).with_name("builtin")
_HUB_ID = re.compile(r"(?!.*(--|\.\.))[A-Za-z0-9][\w.-]*(/[A-Za-z0-9_][\w.-]*)?(?<!\.git)(?<!\.safetensors)")
_SIDE = re.compile(r"([^@]+)@([A-Za-z_][\w-]*)=([^@,]+)")  # a model with a setting, as `parity` and `compare` take it
_UNWRITABLE = (errno.ENOSPC, errno.EACCES, errno.EROFS, errno.EPERM, errno.EDQUOT)
_FILES = (".gguf", ".safetensors")  # suffixes of file names
# Owners under whom the Hub keeps the checkpoints that once had bare ids ("gpt2"); "x/gpt2" is another model.
_CANONICAL = (
    "openai-community/", "google-t5/", "google-bert/", "FacebookAI/", "distilbert/", "Salesforce/", "xlnet/", "albert/",
    "transfo-xl/",
)  # fmt: skip
_COMMIT = re.compile(r"[0-9a-f]{40}")
_ALLOW = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja", "*.spm", "*.tiktoken"]
_CONFIGS = ["config.json", "generation_config.json"]
_PICKLES = ["pytorch_model*.bin"]
# Subfolders hold other formats (onnx/, original/); `consolidated` and precision variants are second copies.
_IGNORE = ["*/*", "consolidated*", "*.fp16*", "*.fp32*", "*.bf16*", "README*", "LICENSE*", "requirements*"]
_LISTS = "genctl models lists the checkpoints on this machine"


@dataclass(frozen=True)
class CheckpointFolder:
    """The local folder of a checkpoint."""

    folder: Path
    notes: tuple[str, ...] = ()
    gguf: Path | None = None  # the file that is the complete checkpoint


def builtins() -> list[str]:
    """Names of the checkpoints that ship with genctl."""
    return sorted(path.parent.name for path in BUILTIN.glob("*/config.json"))


def resolve(
    model: str,
    *,
    revision: str | None = None,
    offline: bool | str = False,
    allow_pickle: bool = False,
    trust_remote_code: bool = False,
    on_event: OnEvent | None = None,
    configs_only: bool = False,
) -> CheckpointFolder:
    """Find `model`; download it (or its configs) if necessary and not `offline` (True, or the reason in words).

    Raises ModelError, or UsageError for conflicting options.
    """
    if (side := _SIDE.fullmatch(model)) and not os.path.lexists(model):
        raise ModelError(
            f"no checkpoint {model!r:.80}: @ with settings belongs to parity, compare and audit",
            hint=f"here a setting is an option: -m {side[1]} --{side[2].replace('_', '-')} {side[3]}",
        )
    if model.startswith("builtin:"):
        name = model.removeprefix("builtin:")
        if name not in builtins():
            near = nearest(name, builtins())
            raise ModelError(
                f"no built-in checkpoint {name!r:.80}; there are: {', '.join(builtins()) or 'none'}",
                hint=f"did you mean builtin:{near}?" if near else "",
            )
        return _local(BUILTIN / name, revision)
    if not model or "\0" in model:
        raise UsageError("the model's name is empty" if not model else "the model's name holds a NUL")
    path = Path(model).expanduser()
    try:
        if path.is_dir():
            return _local(path, revision)
        exists = path.exists() or path.is_symlink()
    except OSError as error:
        raise ModelError(f"cannot read {model}: {reason_of(error)}") from error
    if exists and path.suffix == ".gguf" and path.is_file():
        return replace(_local(path.parent, revision), gguf=path)
    if exists:
        hint = "give the folder that holds it" if path.suffix in (".safetensors", ".json", ".bin") else ""
        raise ModelError(f"{model} is a file, not a checkpoint folder", hint=hint)
    if model.endswith(_FILES):
        raise ModelError(cannot_read(model, "no such file"), hint=_LISTS)
    if not _HUB_ID.fullmatch(model):
        raise ModelError(f"no such folder: {model}", hint=_LISTS)
    return HubCheckpoint(model, revision, offline, allow_pickle, trust_remote_code, on_event, configs_only).fetch()


def needs_download(model: str, revision: str | None) -> bool:
    """Whether a name means a Hub checkpoint that is not in the cache. Never uses the network."""
    try:
        is_id = bool(_HUB_ID.fullmatch(model)) and not Path(model).expanduser().exists()
        return is_id and not HubCheckpoint(model, revision, configs_only=True).cached()
    except (OSError, RuntimeError, ValueError):
        return False


def _local(folder: Path, revision: str | None) -> CheckpointFolder:
    if revision is not None:
        problem = f"--revision {shown(revision)} makes no sense with {shown(str(folder))}"
        raise UsageError(f"{problem}: only Hub checkpoints have revisions")
    return CheckpointFolder(folder)


@dataclass(frozen=True)
class HubCheckpoint:
    """A Hub id, to be found in the cache or downloaded."""

    model: str
    revision: str | None = None
    offline: bool | str = False
    allow_pickle: bool = False
    trust_remote_code: bool = False
    on_event: OnEvent | None = None
    configs_only: bool = False

    def fetch(self) -> CheckpointFolder:
        """The folder in the cache, after a download if necessary. Raises ModelError."""
        from huggingface_hub import HfApi, constants, errors, snapshot_download

        named = self.model + (f" ({self.revision})" if self.revision else "")
        if self.offline or constants.HF_HUB_OFFLINE:
            why = self.offline if isinstance(self.offline, str) else "--offline"
            why = f"the Hub is not used ({why if self.offline else 'HF_HUB_OFFLINE is set'})"
            if (folder := self.cached()) is None:
                raise self._not_cached(f"{named} is not in the cache, and {why}")
            return CheckpointFolder(folder)
        is_commit = self.revision is not None and _COMMIT.fullmatch(self.revision)  # a cached commit is valid
        if is_commit and (folder := self.cached()) is not None:
            return CheckpointFolder(folder)
        try:
            listing = HfApi().model_info(self.model, revision=self.revision, timeout=10)
            self._check_listing([item.rfilename for item in listing.siblings or []])
            bar = bar_class(self.on_event, self.model, "B")
            return CheckpointFolder(Path(snapshot_download(**self._files, tqdm_class=bar)))
        except ModelError:
            raise
        except errors.RevisionNotFoundError as error:
            raise ModelError(f"{self.model} has no revision {self.revision!r} on the Hub") from error
        except errors.GatedRepoError as error:
            hint = "ask for access on its page, then log in with `hf auth login` or set HF_TOKEN"
            raise ModelError(f"{self.model} is gated: the Hub wants to know who you are", hint=hint) from error
        except (errors.RepositoryNotFoundError, errors.HFValidationError) as error:
            problem = f"no local folder and no checkpoint on the Hub is called {self.model}"
            raise ModelError(problem, hint="a private one needs HF_TOKEN or `hf auth login`") from error
        except Exception as error:  # the HTTP library of the Hub's client differs by version
            if isinstance(error, OSError) and error.errno in _UNWRITABLE:
                raise ModelError(f"cannot write to the cache {constants.HF_HUB_CACHE}: {error.strerror}") from error
            why = without_secrets(f"the Hub ({constants.ENDPOINT}) cannot be reached: {brief(error)}")
            if (folder := self.cached()) is None:
                raise self._not_cached(f"{why}; {named} is not in the cache") from error
            return CheckpointFolder(folder, (f"{why}; using the cached {named}",))

    def cached(self) -> Path | None:
        """The newest complete snapshot in the cache, or None. Never uses the network."""
        from huggingface_hub import errors, snapshot_download

        for owner in ("", *(_CANONICAL if "/" not in self.model else ())):
            with suppress(errors.LocalEntryNotFoundError, errors.HFValidationError, OSError, ValueError):
                files = {**self._files, "repo_id": owner + self.model}
                folder = Path(snapshot_download(**files, local_files_only=True))
                if (folder / "config.json").is_file():
                    return folder
        return None

    @property
    def _files(self) -> dict[str, Any]:
        """The arguments of `snapshot_download` that select files."""
        wanted = _CONFIGS if self.configs_only else _ALLOW + (_PICKLES if self.allow_pickle else [])
        wanted = wanted + (["*.py"] if self.trust_remote_code else [])
        named = {"repo_id": self.model, "revision": self.revision}
        return {**named, "allow_patterns": wanted, "ignore_patterns": _IGNORE}

    def _check_listing(self, files: list[str]) -> None:
        """Refuse an unusable checkpoint before it is downloaded."""
        if "config.json" not in files:
            have = ", ".join(shown(name) for name in sorted(files)[:6]) or "nothing"
            raise ModelError(f"{self.model} on the Hub is not a checkpoint: it has no config.json, only {have}")
        is_safe = any(name.endswith(".safetensors") and "/" not in name for name in files)
        is_pickled = any(name.startswith("pytorch_model") for name in files)
        if self.configs_only or is_safe or (is_pickled and self.allow_pickle):
            return
        if is_pickled:
            hint = "safetensors weights are safe; pickle files can run code as they are read"
            raise ModelError(f"{self.model} has only pickle weights, refused without --allow-pickle", hint=hint)
        raise ModelError(f"{self.model} on the Hub has no safetensors weights")

    def _not_cached(self, message: str) -> ModelError:
        from huggingface_hub import constants

        names = [name for name, folder in _cached_models() if any(folder.glob("snapshots/*/config.json"))]
        listed = ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
        have = f"cached: {listed}" if names else f"nothing is cached in {constants.HF_HUB_CACHE}"
        fetch = f"`hf download {shlex.quote(self.model)}` downloads it"
        hint = f"{have}; {fetch}, genctl models lists what is here, and builtin:stories needs no network"
        return ModelError(message, hint=hint)


def _cached_models() -> list[tuple[str, Path]]:
    """Hub ids in the cache, and their folders. Raises OSError."""
    from huggingface_hub import constants

    folders = Path(constants.HF_HUB_CACHE).glob("models--*")
    return sorted((folder.name.removeprefix("models--").replace("--", "/"), folder) for folder in folders)


# -- the checkpoints that run without the network: `genctl models` -----------------------------------------------------


@dataclass(frozen=True)
class ListedModel:
    """A checkpoint. One with an `error` cannot be used; its unknown fields are None."""

    name: str  # as -m takes it
    path: str
    bytes: int | None  # on disk, all cached revisions together
    architecture: str | None = None
    dtype: str | None = None
    runtime: str | None = None
    why_not_native: str | None = None
    context: int | None = None  # tokens; None if there is no limit
    error: str | None = None

    def record(self) -> dict[str, Any]:
        """The fields, for JSON."""
        return asdict(self)


def available() -> Iterator[ListedModel]:
    """The built-in checkpoints, then the cached ones by name. A damaged one has an `error`."""
    for name in builtins():
        yield _listed(f"builtin:{name}", BUILTIN / name, BUILTIN / name)
    try:
        cached = _cached_models()
    except OSError:
        return
    for name, folder in cached:
        error = "the cache holds no whole snapshot of it with a config.json"
        try:
            snapshot = HubCheckpoint(name, allow_pickle=True).cached()
        except Exception as problem:  # any error of the Hub's client
            snapshot, error = None, brief(problem)
        if snapshot is None:
            yield ListedModel(name, str(folder), _bytes(folder), error=error)
        else:
            yield _listed(name, snapshot, folder)


def _listed(name: str, folder: Path, counted: Path) -> ListedModel:
    """The entry of a checkpoint folder, from its config.json and headers. `counted` is the folder whose size counts."""
    size = _bytes(counted)
    try:
        checkpoint = check.inspect(folder, allow_pickle=True, trust_remote_code=True, need_tokenizer=False)
        native, why = runtime_choice.plan(Runtime(model=name), checkpoint, trust_remote_code=False)
        dtype = runtime_choice.dtype_of(Runtime(), checkpoint)
    except (GenctlError, OSError, ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        reason = error.message if isinstance(error, GenctlError) else f"config.json cannot be used: {brief(error)}"
        return ListedModel(name, str(folder), size, error=" ".join(reason.split()))
    classes = checkpoint.config.get("architectures")
    kind = classes[0] if isinstance(classes, list) and classes else checkpoint.model_type
    return ListedModel(
        name,
        str(folder),
        size,
        architecture=str(kind),
        dtype=dtype,
        runtime="transformers" if native is None else "native",
        why_not_native=why or None,
        context=context_of(checkpoint.config),
    )


def _bytes(folder: Path) -> int | None:
    """The bytes of all files below a folder; a link and its target count once."""
    try:
        return sum(path.lstat().st_size for path in folder.rglob("*") if path.is_symlink() or not path.is_dir())
    except OSError:
        return None
