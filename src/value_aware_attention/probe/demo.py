"""Five ways to keep four keys, in a packaged encoder, within seconds: value-aware demo."""

from argparse import ArgumentParser

from value_aware_attention.records.headline import METHOD_NAMES

SENTENCE = (
    "The keys to the old cabinet are lost, so nobody has read the letters that the captain wrote "
    "to his sister before the ship sailed."
)


def main(arguments: list[str] | None = None, prog: str = "value-aware demo") -> None:
    """Prints a row for each way: its losses with trained and random weights, and a query's keys.

    Raises FileNotFoundError if the package of the encoder is not installed.
    """
    ArgumentParser(
        prog=prog,
        description="An encoder reads a sentence, and every token may attend to 4 vectors only. "
        "What is lost, by how these are chosen? Random weights are the control.",
        epilog="The encoder is all-MiniLM-L6-v2, of an installed package. Nothing is downloaded.",
    ).parse_args(arguments)
    from value_aware_attention import measurement, probe  # they import torch
    from value_aware_attention.approximations import OptimalValueOblivious
    from value_aware_attention.measurement.control import random_weights

    model, tokenizer = probe.loaded("minilm")
    words = tokenizer.convert_ids_to_tokens(tokenizer(SENTENCE)["input_ids"])
    tasks = [
        probe.window_task(network, tokenizer, SENTENCE, windows=1, length=len(words), seed=0)[0]
        for network in (model, random_weights(model))
    ]
    methods = probe.default_methods()
    records = [
        measurement.measure(task, methods, sizes=[4], layers=None, progress=False) for task in tasks
    ]
    layer, head, token = 0, 10, 8  # a query for which the ways differ
    call = tasks[0].layer_calls()[layer]
    print(
        f"all-MiniLM-L6-v2 reads {len(words)} tokens; each attends to 4 vectors in every layer and "
        "head,\nchosen by weight (OVO), for the output (value-aware, OVA) or by place. error: "
        "|o - õ|² / |o|² of all\nheads; cosine: of the last hidden states to those of exact "
        f"attention, 1 = nothing lost.\n\n{'':28}{'trained':20}{'random weights':20}\n"
        f"{'4 vectors':28}{2 * 'error     cosine    '}kept for '{words[token]}', layer {layer}, "
        f"head {head}"
    )
    for cells in zip(*(record.cells[1:] for record in records), strict=True):
        name = cells[0].approximation
        method = methods[name](4, layer)  # a slot is the mean beside the 3 keys of largest weight
        chosen = getattr(method, "select", OptimalValueOblivious(3).select)(**call.arguments())
        vectors = [*(words[key] for key in chosen.indices[0, head, token]), "and the mean"]
        weights = [*chosen.all_weights()[0, head, token].tolist(), not hasattr(method, "select")]
        print(
            f"{METHOD_NAMES.get(name, name.replace('_', ' ')):28}",
            *(f"{cell.error.relative:<10.3f}{cell.value:<10.3f}" for cell in cells),
            " ".join(word for word, weight in zip(vectors, weights, strict=False) if weight > 0),
            sep="",
        )
