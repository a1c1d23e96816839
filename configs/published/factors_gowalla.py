"""Gowalla, matrix factorisation.

Command:   python examples/published/factors.py --data gowalla
Hardware:  one core of an x86-64 CPU, the other one busy; 6 minutes; JAX 0.10.2
Expected:  recall@20 0.168 and NDCG@20 0.134 (examples/published/README.md)
"""

seed = 0
epochs = 40
evaluate_every = 10  # epochs, with --validate
batch_size = 2048  # pairs

dim = 64
init_scale = 0.1
drawn = 1024  # places that are drawn for a batch
temperature = 0.1  # of cosines
popularity = 0.5  # times the log of how often a place was visited is taken off a score
learning_rate = 1e-2  # Adam; falls to 0 along a cosine
