"""A dataset by its id on the hub: streamed, known by its commit, found again without the hub (one on this machine)."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

import pytest

pytest.importorskip("datasets", reason="datasets is not installed")

FIRST, SECOND = "0123456789abcdef0123456789abcdef01234567", "fedcba9876543210fedcba9876543210fedcba98"


class Hub(BaseHTTPRequestHandler):
    """One dataset `owner/name`, as the real client asks for it."""

    protocol_version = "HTTP/1.1"
    commit = FIRST
    files = {  # noqa: RUF012
        "train.jsonl": "".join(f'{{"text": "document {i}"}}\n' for i in range(50)).encode(),
        "test.jsonl": b'{"text": "one more"}\n',
    }

    def log_message(self, *_):
        pass

    def answer(self, code, body=b"", **headers):
        self.send_response(code)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def do_GET(self):
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        path = unquote(urlsplit(self.path).path)
        facts = {"X_Repo_Commit": self.commit}
        if re.fullmatch(r"/api/datasets/owner/name(/revision/[^/]+)?", path):
            about = {"id": "owner/name", "sha": self.commit, "private": False, "tags": [], "siblings": []}
            return self.answer(200, json.dumps(about).encode(), Content_Type="application/json")
        if path.startswith("/api/datasets/owner/name/tree/"):
            tree = [
                {"type": "file", "oid": "0" * 40, "size": len(data), "path": name}
                for name, data in self.files.items()
            ]
            return self.answer(200, json.dumps(tree).encode(), Content_Type="application/json")
        file = re.fullmatch(r"/datasets/owner/name/resolve/[^/]+/(.+)", path)
        if not file or file[1] not in self.files:
            return self.answer(404, b"{}", X_Error_Code="EntryNotFound" if file else "RepoNotFound", **facts)
        data = self.files[file[1]]
        asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range") or "")
        if not asked:
            return self.answer(200, data, ETag='"x"', **facts)
        first, last = int(asked[1]), min(int(asked[2] or len(data)), len(data) - 1)
        span = f"bytes {first}-{last}/{len(data)}"
        return self.answer(206, data[first : last + 1], Content_Range=span, ETag='"x"', **facts)

    do_HEAD = do_POST = do_GET


CODE = """
import json, sys
from pathlib import Path
from tokenizers import Tokenizer, models, pre_tokenizers
from qkform.errors import DataError
from qkform.training import data

class Light:
    name_or_path = "light"
    backend_tokenizer = Tokenizer(models.WordLevel({"[SEP]": 0, "[UNK]": 1, "document": 2}, unk_token="[UNK]"))
    backend_tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    sep_token_id, unk_token_id, all_special_ids = 0, 1, [0, 1]
    bos_token_id = eos_token_id = pad_token_id = cls_token_id = mask_token_id = None
    def get_vocab(self):
        return self.backend_tokenizer.get_vocab()
    def __len__(self):
        return 3

try:
    corpus = data.corpus(sys.argv[1], split=sys.argv[2])
    tokens = data.prepare(corpus, Light(), 3, held_out=0)
    print(json.dumps({"identity": corpus.identity(), "info": tokens.info, "first": tokens.train[:2].tolist()}))
except DataError as error:
    print(json.dumps({"error": str(error)}))
"""


@pytest.fixture
def ask(tmp_path):
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()

    def run(source="owner/name", split="train", **environment):
        kept = {
            key: value
            for key, value in os.environ.items()
            if key.lower() not in ("http_proxy", "https_proxy")
        }
        kept.pop("HF_HUB_OFFLINE", None)
        kept |= {
            "HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}",
            "HF_HOME": str(tmp_path / "hf"),
            "QKFORM_CACHE": str(tmp_path / "cache"),
        }
        done = subprocess.run(
            [sys.executable, "-c", CODE, source, split],
            env=kept | environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    yield run
    server.shutdown()
    server.server_close()


def test_a_dataset_on_the_hub_is_streamed_and_known_by_its_commit(ask):
    found = ask()
    assert found["identity"]["files"] == [f"hf://datasets/owner/name@{FIRST}/train.jsonl"]
    assert found["info"]["documents"] == 50
    assert found["first"] == [[2, 1, 0], [2, 1, 0]]  # "document", a number, the end


@pytest.mark.slow
def test_a_moved_branch_is_another_text_a_lost_hub_the_same_and_what_is_missing_is_said(ask, monkeypatch):
    first = ask()
    assert ask(HF_HUB_OFFLINE="1") == first
    assert "no split 'valid'" in ask(split="valid")["error"]
    assert "owner/other" in ask("owner/other")["error"]
    assert "owner/name" in ask(split="test", HF_HUB_OFFLINE="1")["error"]
    monkeypatch.setattr(Hub, "commit", SECOND)
    monkeypatch.setitem(Hub.files, "train.jsonl", b'{"text": "document"}\n' * 9)
    second = ask()
    assert second["identity"]["files"] == [f"hf://datasets/owner/name@{SECOND}/train.jsonl"]
    assert second["info"]["key"] != first["info"]["key"]
    assert second["info"]["documents"] == 9
