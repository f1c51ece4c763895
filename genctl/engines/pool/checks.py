"""What is refused before workers start: more of them than fit, and an address at which there is no Ray cluster.

Each worker has its own copy of the weights, unless they stay in their files: the native runtime maps weights from
safetensors files, which all processes share, if it computes in their dtype.
"""

from __future__ import annotations

import importlib.util
import os
import socket
import sys

from genctl.decode.threads import cores, from_environment
from genctl.errors import GenctlError, UsageError, count, extra, size
from genctl.params import Runtime

PROCESS = 400 << 20  # bytes of a worker besides weights: Python, torch and Ray
_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "int8": 1, "int4": 0.5}


def require_ray(flag: str) -> None:
    """Raises UsageError where Ray is not installed."""
    if importlib.util.find_spec("ray") is None:
        raise UsageError(f"{flag} needs Ray, which is not installed", hint=extra("ray"))


def check_cores(workers: int | None, address: str | None) -> None:
    """Raises UsageError for more workers than there are cores here."""
    number = cores()
    if workers is None or address is not None or is_running() or workers <= number:
        return
    there = f"there {'is' if number == 1 else 'are'} {count(number, 'core')}"
    raise UsageError(f"--workers {workers}: {there}, and each worker takes one", hint=f"--workers {number} fits")


def is_running() -> bool:
    """Whether this process uses a Ray already."""
    ray = sys.modules.get("ray")
    return ray is not None and bool(ray.is_initialized())


def threads_for(cores: int, workers: int) -> int:
    """Threads of each worker: OMP_NUM_THREADS where it is set, else an equal share of the cores at most."""
    given = from_environment()
    return max(cores // workers, 1) if given is None else given[0]


def own_weights(runtime: Runtime, trust: dict[str, bool]) -> int:
    """Bytes of the weights that each process needs for itself; 0 if they are shared, or if their size is not known."""
    from genctl.models import check, runtime_choice
    from genctl.models.resolve import resolve
    from genctl.native.plan import DTYPES

    try:
        place = resolve(runtime.model, revision=runtime.revision, offline=True, allow_pickle=trust["allow_pickle"])
        if place.gguf is not None:
            return place.gguf.stat().st_size
        checkpoint = check.inspect(place.folder, need_tokenizer=False, **trust)
        native, _ = runtime_choice.plan(runtime, checkpoint, trust_remote_code=trust["trust_remote_code"])
    except (GenctlError, OSError):
        return 0  # not downloaded yet, or unusable: a worker reports the reason
    dtype = runtime_choice.dtype_of(runtime, checkpoint)
    tensors = checkpoint.weights.tensors.values()
    if native is not None and runtime.quantize is None and {DTYPES.get(tensor.dtype) for tensor in tensors} == {dtype}:
        return 0
    if not tensors:
        return checkpoint.weights.bytes
    return int(sum(tensor.numel for tensor in tensors) * _BYTES.get(runtime.quantize or dtype, 2))


def check_memory(workers: int, runtime: Runtime, trust: dict[str, bool]) -> None:
    """Raises UsageError for more workers than memory is free for. Where their size is not known, nothing is checked."""
    import psutil

    weights = own_weights(runtime, trust)
    free = int(psutil.virtual_memory().available)
    fitting = free // (weights + PROCESS)
    if workers > 1 and workers > fitting:
        fits = max(int(fitting), 1)
        raise UsageError(
            f"--workers {workers}: each needs {size(weights + PROCESS)} of memory (weights: {size(weights)}), and "
            f"{size(free)} are free",
            hint=f"--workers {fits} fits" if fitting else "not even one worker is sure to fit",
        )


# -- whether a Ray cluster answers at an address: Ray itself would wait for minutes, or for ever, and say little -------

ANSWER_S = 15.0  # until an address that accepts connections and does not answer is given up
CONNECT_S = 10.0  # until one that does not accept is
CLIENT = "ray://"
TOKEN = "Ray reads it from RAY_AUTH_TOKEN, from the file RAY_AUTH_TOKEN_PATH, or from ~/.ray/auth_token"
# Ray's head (`HOST:PORT`) and its client server (`ray://HOST:PORT`) speak gRPC. Each has a call that only asks whether
# it is there, with what is sent: "are you alive?" to a head, "ping" to a client server (ray/protobuf).
_HEAD = ("/ray.rpc.NodeInfoGcsService/CheckAlive", b"")
_CLIENT_SERVER = ("/ray.rpc.RayletDriver/ClusterInfo", b"\x08\x04")


def probe(address: str) -> None:
    """Raises UsageError where no Ray cluster answers at HOST:PORT, or where it asks for a token and Ray sends none.

    `auto` is not looked at.
    """
    host, colon, port = address.removeprefix(CLIENT).rpartition(":")
    if not (colon and port.isdecimal()):
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_S).close()
    except (OSError, OverflowError) as error:
        raise nothing_there(address, getattr(error, "strerror", None) or "no answer") from error
    if os.environ.get("RAY_USE_TLS", "0") not in ("", "0"):
        return  # Ray has the certificates
    try:
        import grpc
    except ImportError:  # Ray without its client
        return
    method, request = _CLIENT_SERVER if address.startswith(CLIENT) else _HEAD
    reasons = {
        grpc.StatusCode.UNIMPLEMENTED: "what listens there speaks gRPC, but is not Ray's",
        grpc.StatusCode.DEADLINE_EXCEEDED: f"what listens there does not answer within {ANSWER_S:.0f} s",
        grpc.StatusCode.UNAVAILABLE: "what listens there does not speak Ray's protocol",
    }
    with grpc.insecure_channel(f"{host}:{port}", options=[("grpc.enable_http_proxy", 0)]) as channel:
        try:
            channel.unary_unary(method)(request, timeout=ANSWER_S)
        except grpc.RpcError as error:
            code = error.code()
            if code in reasons:
                raise nothing_there(address, reasons[code]) from error
            if code == grpc.StatusCode.UNAUTHENTICATED and not sends_token():
                message = f"--address {address}: the cluster asks for a token, and none is sent"
                raise UsageError(message, hint=f"RAY_AUTH_MODE=token sends it; {TOKEN}") from error


def sends_token() -> bool:
    """Whether Ray sends a token. It says nothing of one that is not there or not right."""
    return os.environ.get("RAY_AUTH_MODE", "").lower() == "token"


def nothing_there(address: str, reason: str, hint: str = "") -> UsageError:
    """The error of an address at which there is no cluster to join."""
    return UsageError(f"--address {address}: there is no Ray cluster to join: {reason}", hint=hint)
