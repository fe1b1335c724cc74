"""Training: Lightning modules, optimizers and schedules (appendix A)."""

from value_aware_study.training.bert_adam import BertAdam
from value_aware_study.training.causal import CausalTraining
from value_aware_study.training.fit import fit
from value_aware_study.training.masked import MaskedTraining
from value_aware_study.training.muon import Muon
from value_aware_study.training.one_step import one_step
from value_aware_study.training.schedules import InverseSquareRoot, LinearWarmupDecay

__all__ = [
    "BertAdam",
    "CausalTraining",
    "InverseSquareRoot",
    "LinearWarmupDecay",
    "MaskedTraining",
    "Muon",
    "fit",
    "one_step",
]
