"""Measure a method of your own beside the two optimal ones, without a change of the library.

    python examples/a_method_of_your_own.py

The method keeps the r keys whose values are largest, whatever the query. The script prints the
relative output error of three methods with 8 keys on random attention, and the cosine of an
encoder's hidden states with each of them in every layer; 1 means that nothing was lost.
"""

import torch

from value_aware_attention import attention, error, hugging_face, probe
from value_aware_attention.approximations import OptimalValueAware, OptimalValueOblivious
from value_aware_attention.approximations.ranked_keys import RankedKeys


class LargestValues(RankedKeys):
    """Keeps the top r keys by ||v_i||, with the weights of attention, renormalised."""

    def scores(self, call, weights):
        return call.value.norm(dim=-1)[..., None, :] + torch.zeros_like(weights)


query, key, value = torch.randn(3, 2, 64, 32, generator=torch.Generator().manual_seed(0))
exact = attention(query, key, value)
model, tokenizer = probe.loaded("minilm")
text = tokenizer("The keys to the old cabinet are lost.", return_tensors="pt").to(model.device)
with torch.no_grad():
    states = model(**text).last_hidden_state
    for method in (LargestValues(8), OptimalValueOblivious(8), OptimalValueAware(8)):
        lost = error.relative_output_error(method(query, key, value), exact).median()
        with hugging_face.replace_attention(model, method):
            cosine = torch.cosine_similarity(model(**text).last_hidden_state, states, dim=-1).mean()
        print(f"{method}: error {lost:.3f}, cosine {cosine:.3f}")
