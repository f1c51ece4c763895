"""Resolve a model name to a local folder: a built-in checkpoint, a folder, the Hub's cache, or a download.

Honours HF_HOME, HF_HUB_CACHE, HF_HUB_OFFLINE, HF_ENDPOINT and HF_TOKEN (which never appears in a message).
"""

from __future__ import annotations

import errno
import os
import re
import shlex
from dataclasses import dataclass, replace
from pathlib import Path

from genctl.errors import ModelError, UsageError, cannot_read, nearest, reason_of, without_secrets
from genctl.models.libraries import OnEvent, brief, download_bar
from genctl.models.weights import shown

BUILTIN = Path(__file__).with_name("builtin")
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9_][\w.-]*)?")
_NO_ID = (".git", "/", ".safetensors")  # ends of names that are not ids
_FILES = (".gguf", ".safetensors")  # ends of names that are files
_SIDE = re.compile(r"([^@]+)@([A-Za-z_][\w-]*)=([^@,]+)")  # a model with a setting, as `parity` and `compare` take it
_COMMIT = re.compile(r"[0-9a-f]{40}")
_UNWRITABLE = (errno.ENOSPC, errno.EACCES, errno.EROFS, errno.EPERM, errno.EDQUOT)
# Owners under whom the Hub keeps the checkpoints that once had bare ids ("gpt2"); "x/gpt2" is another model.
_CANONICAL = (
    "openai-community", "google-t5", "google-bert", "FacebookAI", "distilbert", "Salesforce", "xlnet", "albert",
    "transfo-xl",
)  # fmt: skip
_ALLOW = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja", "*.spm", "*.tiktoken"]
_CONFIGS = ["config.json", "generation_config.json"]
_PICKLES = ["pytorch_model*.bin"]
# Subfolders hold other formats (onnx/, original/); `consolidated` and precision variants are second copies.
_IGNORE = ["*/*", "consolidated*", "*.fp16*", "*.fp32*", "*.bf16*", "README*", "LICENSE*", "requirements*"]


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
    """Find `model`, downloading it (or its configs) if necessary, and not `offline` (or why not, in words).

    Raises ModelError, or UsageError for conflicting options.
    """
    if (side := _SIDE.fullmatch(model)) and not os.path.lexists(model):
        flag = f"--{side[2].replace('_', '-')} {side[3]}"
        raise ModelError(
            f"no checkpoint {model!r:.80}: @ with settings belongs to parity, compare and audit",
            hint=f"here a setting is an option: -m {side[1]} {flag}",
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
        raise ModelError(cannot_read(model, "no such file"), hint="genctl models lists the checkpoints on this machine")
    if not _is_hub_id(model):
        raise ModelError(f"no such folder: {model}", hint="genctl models lists the checkpoints on this machine")
    return HubCheckpoint(model, revision, offline, allow_pickle, trust_remote_code, on_event, configs_only).fetch()


def needs_download(model: str, revision: str | None) -> bool:
    """Whether a name is that of a Hub checkpoint which is not in the cache. Never uses the network."""
    cached = HubCheckpoint(model, revision, configs_only=True).cached
    try:
        return not Path(model).expanduser().exists() and _is_hub_id(model) and not cached()
    except (OSError, RuntimeError, ValueError):
        return False


def _is_hub_id(model: str) -> bool:
    return bool(HUB_ID.fullmatch(model)) and "--" not in model and ".." not in model and not model.endswith(_NO_ID)


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
        from huggingface_hub import HfApi, constants, errors

        if self.offline or constants.HF_HUB_OFFLINE:
            folder = self.cached()
            if folder is None:
                why = self.offline if isinstance(self.offline, str) else "--offline"
                why = why if self.offline else "HF_HUB_OFFLINE is set"
                raise self._nowhere(f"{self._named} is not in the cache, and the Hub is not used ({why})")
            return CheckpointFolder(folder)
        if self.revision and _COMMIT.fullmatch(self.revision):  # a commit never changes, so the cached one is valid
            folder = self.cached()
            if folder is not None:
                return CheckpointFolder(folder)
        try:
            listing = HfApi().model_info(self.model, revision=self.revision, timeout=10)
            self._check_listing([item.rfilename for item in listing.siblings or []])
            return CheckpointFolder(self._download())
        except ModelError:
            raise
        except errors.RevisionNotFoundError as error:
            raise ModelError(f"{self.model} has no revision {self.revision!r} on the Hub") from error
        except errors.GatedRepoError as error:
            hint = "ask for access on its page, then log in with `hf auth login` or set HF_TOKEN"
            raise ModelError(f"{self.model} is gated: the Hub wants to know who you are", hint=hint) from error
        except errors.RepositoryNotFoundError as error:
            hint = "a private one needs HF_TOKEN or `hf auth login`"
            raise ModelError(
                f"no local folder and no checkpoint on the Hub is called {self.model}", hint=hint
            ) from error
        except errors.HFValidationError as error:
            raise ModelError(f"no such folder: {self.model}, which is no Hub id either") from error
        except Exception as error:  # the HTTP library of the Hub's client differs by version
            if isinstance(error, OSError) and error.errno in _UNWRITABLE:
                raise ModelError(f"cannot write to the cache {constants.HF_HUB_CACHE}: {error.strerror}") from error
            folder = self.cached()
            why = without_secrets(f"the Hub ({constants.ENDPOINT}) cannot be reached: {brief(error)}")
            if folder is None:
                raise self._nowhere(f"{why}; {self._named} is not in the cache") from error
            return CheckpointFolder(folder, (f"{why}; using the cached {self._named}",))

    def cached(self) -> Path | None:
        """The newest complete snapshot in the cache, or None. Never uses the network."""
        from huggingface_hub import errors, snapshot_download

        owners = () if "/" in self.model else _CANONICAL
        for model in (self.model, *(f"{owner}/{self.model}" for owner in owners)):
            try:
                folder = snapshot_download(
                    model,
                    revision=self.revision,
                    local_files_only=True,
                    allow_patterns=self._allow,
                    ignore_patterns=_IGNORE,
                )
            except (errors.LocalEntryNotFoundError, errors.HFValidationError, OSError, ValueError):
                continue
            if (Path(folder) / "config.json").is_file():
                return Path(folder)
        return None

    @property
    def _allow(self) -> list[str]:
        wanted = _CONFIGS if self.configs_only else _ALLOW + (_PICKLES if self.allow_pickle else [])
        return wanted + (["*.py"] if self.trust_remote_code else [])

    @property
    def _named(self) -> str:
        return self.model + (f" ({self.revision})" if self.revision else "")

    def _check_listing(self, files: list[str]) -> None:
        """Refuse an unusable checkpoint before it is downloaded."""
        if "config.json" not in files:
            have = ", ".join(shown(name) for name in sorted(files)[:6]) or "nothing"
            raise ModelError(f"{self.model} on the Hub is not a checkpoint: it has no config.json, only {have}")
        if self.configs_only:
            return
        safe = any(name.endswith(".safetensors") and "/" not in name for name in files)
        pickled = any(name.startswith("pytorch_model") for name in files)
        if not safe and not (pickled and self.allow_pickle):
            if pickled:
                hint = "safetensors weights are safe; pickle files can run code as they are read"
                raise ModelError(f"{self.model} has only pickle weights, refused without --allow-pickle", hint=hint)
            raise ModelError(f"{self.model} on the Hub has no safetensors weights")

    def _download(self) -> Path:
        from huggingface_hub import snapshot_download

        folder = snapshot_download(
            self.model,
            revision=self.revision,
            allow_patterns=self._allow,
            ignore_patterns=_IGNORE,
            tqdm_class=download_bar(self.on_event, self.model),
        )
        return Path(folder)

    def _nowhere(self, message: str) -> ModelError:
        from huggingface_hub import constants

        names = cached_models(Path(constants.HF_HUB_CACHE))
        listed = ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
        have = f"cached: {listed}" if names else f"nothing is cached in {constants.HF_HUB_CACHE}"
        fetch = f"`hf download {shlex.quote(self.model)}` downloads it"
        hint = f"{have}; {fetch}, genctl models lists what is here, and builtin:stories needs no network"
        return ModelError(message, hint=hint)


def cached_models(cache: Path) -> list[str]:
    """Hub ids with at least one cached snapshot that has a config."""
    return sorted(
        folder.name.removeprefix("models--").replace("--", "/")
        for folder in cache.glob("models--*")
        if any(folder.glob("snapshots/*/config.json"))
    )
