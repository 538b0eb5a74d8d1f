"""A real llama.cpp server on CPU with a random Llama of 0.5 MB: `python tiny_llamacpp.py PORT [SLEEP_IDLE_SECONDS]`.

Needs `pip install xllamacpp gguf`, which the tests do not: it is to be run by hand, as docs/engines.md says.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path
from typing import Any

WIDTH, LAYERS, HEADS, HIDDEN, CONTEXT = 64, 2, 4, 128, 2048


def write_model(path: Path) -> None:
    """Random weights, and a vocabulary of single bytes."""
    import gguf
    import numpy as np

    rng = np.random.default_rng(1)

    def random(*shape: int) -> Any:
        return rng.normal(0.0, 0.05, shape).astype(np.float32)

    tokens = [b"<unk>", b"<s>", b"</s>", *(b"<0x%02X>" % i for i in range(256)), "▁".encode(), b"a", b"e", b"t"]
    out = gguf.GGUFWriter(path, "llama")
    out.add_context_length(CONTEXT)
    out.add_embedding_length(WIDTH)
    out.add_block_count(LAYERS)
    out.add_feed_forward_length(HIDDEN)
    out.add_head_count(HEADS)
    out.add_head_count_kv(HEADS)
    out.add_layer_norm_rms_eps(1e-5)
    out.add_rope_dimension_count(WIDTH // HEADS)
    out.add_vocab_size(len(tokens))
    out.add_file_type(0)
    out.add_tokenizer_model("llama")
    out.add_token_list(tokens)
    out.add_token_scores([0.0] * 259 + [-1.0, -2.0, -3.0, -4.0])
    out.add_token_types([2, 3, 3] + [6] * 256 + [1] * 4)  # unknown, control, bytes, words
    out.add_bos_token_id(1)
    out.add_eos_token_id(2)
    out.add_unk_token_id(0)
    out.add_chat_template("{% for m in messages %}{{m['role']}}: {{m['content']}}\n{% endfor %}assistant:")
    for name in ("token_embd", "output"):
        out.add_tensor(f"{name}.weight", random(len(tokens), WIDTH))
    out.add_tensor("output_norm.weight", np.ones(WIDTH, np.float32))
    for block in (f"blk.{i}" for i in range(LAYERS)):
        for name in ("attn_norm", "ffn_norm"):
            out.add_tensor(f"{block}.{name}.weight", np.ones(WIDTH, np.float32))
        for name in ("attn_q", "attn_k", "attn_v", "attn_output"):
            out.add_tensor(f"{block}.{name}.weight", random(WIDTH, WIDTH))
        out.add_tensor(f"{block}.ffn_gate.weight", random(HIDDEN, WIDTH))
        out.add_tensor(f"{block}.ffn_up.weight", random(HIDDEN, WIDTH))
        out.add_tensor(f"{block}.ffn_down.weight", random(WIDTH, HIDDEN))
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()


def serve(port: int, sleep_idle_s: int) -> None:
    import xllamacpp

    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "tiny.gguf"
        write_model(model)
        params = xllamacpp.CommonParams()
        params.model.path, params.n_ctx, params.n_parallel = str(model), CONTEXT, 2
        params.hostnames, params.port, params.endpoint_metrics = ["127.0.0.1"], port, True
        params.fit_params, params.sleep_idle_seconds = False, sleep_idle_s
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
        server = xllamacpp.Server(params)
        print(server.listening_address, flush=True)
        while True:
            time.sleep(60)


if __name__ == "__main__":
    serve(int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else -1)
