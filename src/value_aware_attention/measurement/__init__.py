"""How a trained model does with its attention replaced: end metrics, output errors, skewness."""
