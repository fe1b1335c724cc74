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
    from value_aware_study.benchmarking.measurement import Plan, measure, training_times
    from value_aware_study.benchmarking.subjects import (
        build_setting,
        build_subject,
        describe,
        source_of,
    )

    methods, layer = plain(cfg.methods), plain(cfg.layer)
    subjects = [build_subject(name, method) for name, method in methods.items()]
    setting = build_setting(layer)
    lengths = [*cfg.lengths]
    passes = {"forward": lengths, "forward_backward": lengths}
    passes["attention"] = [*cfg.attention_lengths]
    plan = Plan(passes, seconds=cfg.seconds, slowest=cfg.slowest)
    where = asdict(run_on()) | {"threads": setting.threads}
    source = source_of(subjects)
    cells = measure(
        subjects, plan, setting, RecordCache(cfg.cache, {"run_on": where, "source": source})
    )
    record = {
        "run_on": where,
        "source": source,
        "layer": layer | {"device": setting.device, "threads": setting.threads},
        "plan": {**plan.lengths, "seconds": plan.seconds, "slowest": plan.slowest},
        "methods": {s.name: describe(methods[s.name], s, plan, setting) for s in subjects},
        "cells": cells,
    }
    with tracked(cfg, "benchmark", setting.device) as run:
        times = training_times(cells)
        write_json(cfg.metrics, times)
        write_json(cfg.record, record, checksum=True)
        if run:
            run.summary.update({f"{name}_milliseconds": time for name, time in times.items()})


if __name__ == "__main__":
    main()
