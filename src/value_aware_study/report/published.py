"""The numbers that the paper prints, table by table, for the columns next to ours."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class PublishedCell:
    """One approximation with its parameters and the masked-LM error (percent) of Table 1."""

    approximation: str
    parameters: Mapping[str, int | str]
    error: float


# Table 1: masked-LM error (percent) of RoBERTa-4096. Its ORF is as in A.1: scaling "paper".
TABLE_1 = (
    PublishedCell("exact", {}, 24.2),
    PublishedCell("optimal_v_oblivious", {"r": 1}, 96.6),
    PublishedCell("optimal_v_oblivious", {"r": 65}, 43.5),
    PublishedCell("optimal_v_aware", {"r": 1}, 88.6),
    PublishedCell("optimal_v_aware", {"r": 65}, 24.2),
    PublishedCell("orf", {"features": 256, "scaling": "paper"}, 89.79),
    PublishedCell("lsh", {"r": 64, "rounds": 4}, 90.39),
    PublishedCell("lsh", {"r": 512, "rounds": 16}, 26.11),
)
# Section 4: exact attention of the analogous model on 512-long sequences.
SHORT_EXACT = 26.6

# Table 2: the columns (name, approximation, r) and evaluation perplexity for each kernel.
TABLE_2_COLUMNS: tuple[tuple[str, str, int | None], ...] = (
    ("exact", "exact", None),
    ("OVO-1", "optimal_v_oblivious", 1),
    ("OVO-65", "optimal_v_oblivious", 65),
    ("OVA-1", "optimal_v_aware", 1),
    ("OVA-65", "optimal_v_aware", 65),
)
TABLE_2: Mapping[str, tuple[float, ...]] = {
    "exponential": (30.5, 1031.1, 33.5, 280.3, 30.5),
    "polynomial": (34.2, 6700.2, 310.2, 1005.4, 34.2),
    "elu": (35.3, 1770.6, 62.7, 837.4, 35.3),
}

# Table 3: tokens of each corpus (all, training, evaluation).
TABLE_3: tuple[tuple[str, float, float, float], ...] = (
    ("Wikipedia (10/2017)", 2.67e9, 1.53e9, 1.02e6),
    ("BookCorpus (Zhu et al., 2015)", 1.06e9, 1.02e9, 1.02e6),
    ("ArXiv (Cohan et al., 2018)", 1.78e9, 1.53e9, 1.02e6),
    ("PubMed (Cohan et al., 2018)", 0.47e9, 510e6, 1.02e6),
    ("PG19 (Rae et al., 2020)", 3.06e9, 510e6, 1.02e6),
)

Setting = int | float | str

# Table 4 and its caption: the two masked language models.
_TABLE_4_COMMON: Mapping[str, Setting] = {
    "initialisation": "RoBERTa",
    "instances": 10_000_000,
    "batch_size": 8,
    "instance_length": 512,
    "learning_rate": 5e-6,
    "warmup_proportion": 0.1,
    "epochs": 2,
    "steps": 2_476_000,
    "gradient_accumulation": 1,
    "dropout": 0.0,
    "optimizer": "Bert-Adam",
    "beta_1": 0.9,
    "beta_2": 0.98,
    "weight_decay": 0.01,
    "max_grad_norm": 5.0,
    "seed": 42,
}
TABLE_4_SHORT = {**_TABLE_4_COMMON, "length": 512, "block_positions": "n"}
TABLE_4_LONG = {**_TABLE_4_COMMON, "length": 4096, "block_positions": "y"}

# Appendix A.2: the causal language models; only what the paper states.
CAUSAL_SETTINGS: Mapping[str, Setting] = {
    "data": "WikiText-103",
    "layers": 6,
    "width": 512,
    "head_dim": 64,
    "parameters": 156_000_000,
    "training_examples": 1_801_350,
    "length": 512,
    "batch_size": 128,
    "epochs": 20,
    "steps": 31_520,
    "learning_rate": 5e-4,
    "schedule": "inverse square root",
    "warmup_steps": 4000,
    "beta_1": 0.9,
    "beta_2": 0.98,
    "weight_decay": 0.01,
    "max_grad_norm": "none",
    "context": 400,
}
