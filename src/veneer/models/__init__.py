"""Language models: load a checkpoint, generate text, and compare two models.

llama            the model in plain JAX: Llama, Mistral, Qwen2 and Qwen3
language_model   `load`, and `LanguageModel`: chats and generated text
comparison       `compare`: perplexity, KL divergence and agreement of two models
"""

from .comparison import Comparison, compare
from .language_model import Generation, LanguageModel, load

__all__ = ["Comparison", "Generation", "LanguageModel", "compare", "load"]
