"""Stage benchmark: the survey's comparison of time and memory, measured on this machine.

The survey's lengths:  python -m pipelines.benchmark
Longer sequences:      python -m pipelines.benchmark 'benchmark.lengths=[128,1024,4096,16384]'
"""

from dataclasses import asdict

from omegaconf import DictConfig

from pipelines.app import app, plain, write_json


@app("benchmark")
def main(cfg: DictConfig) -> None:
    """Writes the record, and one metric a method."""
    from pipelines.app.tracking import tracked
    from value_aware_attention.measurement.run_on import run_on
    from value_aware_attention.measurement.store import RecordCache
    from value_aware_study.benchmarking import measurement
    from value_aware_study.benchmarking.passes import Setting, Subject

    subjects = [Subject(name, config) for name, config in plain(cfg.methods).items()]
    setting = Setting.here(plain(cfg.layer))
    lengths = {"forward": [*cfg.lengths], "forward_backward": [*cfg.lengths]}
    lengths["attention"] = [*cfg.attention_lengths]
    machine = asdict(run_on()) | {"threads": setting.threads}
    code = {"run_on": machine, "source": measurement.source_of(subjects)}
    benchmark = measurement.Benchmark(
        subjects, setting, cfg.seconds, cfg.slowest, RecordCache(cfg.cache, code)
    )
    cells = list(benchmark.cells(lengths))
    all_lengths = {*cfg.lengths, *cfg.attention_lengths}
    record = code | {
        "how": measurement.HOW,
        "layer": asdict(setting),
        "plan": {**lengths, "seconds": cfg.seconds, "slowest": cfg.slowest},
        "methods": {subject.name: subject.described(all_lengths, setting) for subject in subjects},
        "cells": cells,
    }
    with tracked(cfg, "benchmark", setting.device) as run:
        times = measurement.training_times(cells)
        write_json(cfg.metrics, times)
        write_json(cfg.record, record, checksum=True)
        if run:
            run.summary.update({f"{name}_milliseconds": time for name, time in times.items()})


if __name__ == "__main__":
    main()
