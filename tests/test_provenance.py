"""A record describes its hardware well enough to explain numbers, and names no machine."""

import json
import platform
import socket
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

from value_aware_attention.measurement.run_on import cores_of, processor, run_on

CORE = "processor\t: {}\ncpu family\t: 25\nmodel\t\t: {}\nmodel name\t: AMD EPYC\n\n"


def test_processors_of_one_name_are_told_apart_where_the_system_tells_more(tmp_path: Path) -> None:
    told = []
    for model in (1, 17):
        info = tmp_path / str(model)
        info.write_text("".join(CORE.format(core, model) for core in range(2)))
        told.append(processor(info))
    vectors = torch.backends.cpu.get_cpu_capability()
    assert told[0] == {"name": "AMD EPYC", "family": "25", "model": "1", "vectors": vectors}
    assert cores_of(told[0]).endswith(f"of AMD EPYC (family 25, model 1, {vectors})")
    assert cores_of(told[0]) != cores_of(told[1])
    less = processor(tmp_path / "missing")
    assert less["family"] is None
    assert "family" not in cores_of(less) and "None" not in cores_of(less)


def test_what_numbers_were_made_on_names_no_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "node", lambda: "a-host-name")
    monkeypatch.setattr(socket, "gethostname", lambda: "a-host-name")
    where = asdict(run_on())
    assert where["processor"] == processor() and where["threads"] == torch.get_num_threads()
    assert "a-host-name" not in json.dumps(where)
