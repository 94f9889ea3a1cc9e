"""Texts ordered by how close they are to a question. Vectors have length 1: a dot product is the cosine.

Small chat models tell subjects apart roughly; a model made for embeddings is better at it.
"""

import numpy as np

from rvllm import LLM

TEXTS = [
    "Bread is made of flour, water, salt and yeast.",
    "The train to Berlin leaves at nine.",
    "Knead the dough for ten minutes and let it rise.",
    "Photosynthesis turns light into sugar.",
]
QUESTION = "How do I bake a loaf?"

llm = LLM()
vectors = np.array(llm.embed([QUESTION, *TEXTS]))
assert np.allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-4)
similarities = vectors[1:] @ vectors[0]
for i in np.argsort(-similarities):
    print(f"{similarities[i]:.3f}  {TEXTS[i]}")
