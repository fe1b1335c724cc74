"""Stage train_causal: a decoder whose every layer attends with one kernel (A.2).

python -m pipelines.train_causal kernel=exponential|polynomial|elu [causal.steps=700]
python -m pipelines.train_causal kernel=exponential attention=sliding_window
"""

from pathlib import Path

from hydra.utils import instantiate
from omegaconf import DictConfig

from pipelines.app import app


@app("train_causal")
def main(cfg: DictConfig) -> None:
    """Writes <models>/causal_<kernel>/ and the learning curve.

    AutoModelForCausalLM (after `import value_aware_attention.models`) and AutoTokenizer read it.
    """
    from pipelines.app.training import train, trained_attention
    from value_aware_attention.hugging_face.saved import saved_tokenizer
    from value_aware_attention.linear_memory import with_linear_memory
    from value_aware_attention.models import CausalLanguageModel
    from value_aware_study.data.batches import CausalBatches
    from value_aware_study.data.tokens import TOKENS_REMEDY, check_vocabulary, held_out_split

    attention, head_dim = trained_attention(cfg), cfg.model.width // cfg.model.heads
    length, step = cfg.batches.length, cfg.batches.batch_size * cfg.batches.length
    if attention:
        attention.check_trainable(
            kernel=instantiate(cfg.model.kernel), length=length, head_dim=head_dim, is_causal=True
        )
    folder = Path(cfg.tokens)
    batches = CausalBatches(folder / "train.npy", steps=cfg.fit.steps, **cfg.batches)
    held_out = CausalBatches(
        folder / f"{held_out_split(folder, step)}.npy",
        steps=cfg.training.evaluation_batches,
        **cfg.batches,
    )
    tokenizer = saved_tokenizer(folder / "tokenizer", TOKENS_REMEDY)
    check_vocabulary(folder / "train.npy", batches.tokens, len(tokenizer))
    facts = {
        "vocabulary_size": len(tokenizer),
        "head_dim": head_dim,
        "epochs": round(cfg.fit.steps * step / len(batches.tokens), 2),
        "data": cfg.data,
        "context": cfg.context,
        **({"attention": str(attention)} if attention else {}),
    }

    def module():
        model = instantiate(cfg.model, _partial_=True)  # Hydra would make a config of `attention`
        return instantiate(
            cfg.module,
            with_linear_memory(model(vocabulary_size=len(tokenizer), trained_attention=attention)),
        )

    train(cfg, module, batches, held_out, save=CausalLanguageModel.save_pretrained, facts=facts)


if __name__ == "__main__":
    main()
