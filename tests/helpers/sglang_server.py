"""A stand-in for an SGLang server with one worker, which receives weights as SGLang does.

    python tests/helpers/sglang_server.py PORT FOLDER

It accepts the requests of SGLang's http_server.py with the fields of io_struct.py, and refuses
others. After the last request of an update, the one with flush_cache, it writes the weights to
FOLDER/N/model.safetensors, N counting the updates from 0.
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

# the fields of InitWeightsUpdateGroupReqInput and UpdateWeightsFromDistributedReqInput
JOIN = {"master_address", "master_port", "rank_offset", "world_size", "group_name", "backend"}
UPDATE = {"names", "dtypes", "shapes", "group_name", "flush_cache"}
UPDATE_MORE = {"abort_all_requests", "weight_version", "load_format", "torch_empty_cache"}


class Handler(BaseHTTPRequestHandler):
    folder: Path
    groups: dict[str, Any] = {}
    weights: dict[str, torch.Tensor] = {}
    updates = 0

    def do_POST(self) -> None:
        content = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        try:
            {
                "/init_weights_update_group": self.join,
                "/update_weights_from_distributed": self.update,
            }[self.path](content)
            answer = {"success": True, "message": "done"}
        except Exception as error:
            answer = {"success": False, "message": repr(error)}
        body = json.dumps(answer).encode()
        self.send_response(200 if answer["success"] else 400)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def join(self, content: dict[str, Any]) -> None:
        assert content.keys() == JOIN, content.keys()
        place = f"tcp://{content['master_address']}:{content['master_port']}"
        name = content["group_name"]
        self.groups[name] = init_custom_process_group(
            content["backend"], place, content["world_size"], content["rank_offset"], name
        )

    def update(self, content: dict[str, Any]) -> None:
        assert UPDATE <= content.keys() <= UPDATE | UPDATE_MORE, content.keys()
        for name, dtype, shape in zip(
            content["names"], content["dtypes"], content["shapes"], strict=True
        ):
            tensor = torch.empty(shape, dtype=getattr(torch, dtype))
            dist.broadcast(tensor, src=0, group=self.groups[content["group_name"]])
            assert name not in self.weights, f"{name} came twice"
            self.weights[name] = tensor
        if content["flush_cache"]:
            update = self.folder / str(Handler.updates)
            update.mkdir()
            save_file(self.weights, update / "model.safetensors")
            self.weights.clear()
            Handler.updates += 1

    def log_message(self, *args: Any) -> None:
        pass


if __name__ == "__main__":
    Handler.folder = Path(sys.argv[2])
    HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
