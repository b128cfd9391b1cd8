"""A stand-in for a vLLM server with one worker, which receives weights as vLLM does.

    python tests/helpers/vllm_server.py PORT FOLDER

It accepts the requests of vLLM's weight transfer, in their order and with their fields, and refuses
others. At the end of an update, it writes the weights to FOLDER/N/model.safetensors, N counting the
updates from 0.
"""

from __future__ import annotations

import json
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file

sys.path.insert(0, str(Path(__file__).parent / "fake_sglang"))
from sglang.srt.utils import init_custom_process_group

INIT = {"master_address", "master_port", "rank_offset", "world_size"}
UPDATE = ("names", "dtype_names", "shapes")


class Handler(BaseHTTPRequestHandler):
    folder: Path
    group: Any = None
    started = False
    weights: dict[str, torch.Tensor] = {}
    updates = 0

    def do_POST(self) -> None:
        content = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        try:
            getattr(self, self.path.strip("/"))(**content)
            answer = 200
        except Exception as error:
            print(self.path, repr(error), file=sys.stderr, flush=True)
            answer = 500
        self.send_response(answer)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        assert init_info.keys() == INIT, init_info.keys()
        place = f"tcp://{init_info['master_address']}:{init_info['master_port']}"
        world, rank = init_info["world_size"], init_info["rank_offset"]
        Handler.group = init_custom_process_group("gloo", place, world, rank, "vllm")

    def start_weight_update(self) -> None:
        assert not Handler.started
        Handler.started = True

    def update_weights(self, update_info: dict[str, Any]) -> None:
        assert Handler.started and update_info.keys() == set(UPDATE), update_info.keys()
        for name, dtype, shape in zip(*(update_info[key] for key in UPDATE), strict=True):
            tensor = torch.empty(shape, dtype=getattr(torch, dtype))
            dist.broadcast(tensor, src=0, group=self.group)
            assert name not in self.weights, f"{name} came twice"
            self.weights[name] = tensor

    def finish_weight_update(self) -> None:
        assert Handler.started
        update = self.folder / str(Handler.updates)
        update.mkdir(parents=True)
        save_file(self.weights, update / "model.safetensors")
        self.weights.clear()
        Handler.updates, Handler.started = Handler.updates + 1, False

    def log_message(self, *args: Any) -> None:
        pass


if __name__ == "__main__":
    Handler.folder = Path(sys.argv[2])
    HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
