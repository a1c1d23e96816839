"""HSTU layers with biases by position and time: the next films of MovieLens-100K.

Command:   python examples/hstu/next_film.py --devices 1
Hardware:  2 cores of an x86-64 CPU beside much other work, so no time is given; JAX 0.10.2
Expected:  NDCG@10 0.0802, 0.0719 and 0.0874 with the seeds 0 to 2 (mean 0.080, standard deviation
           0.006). The model of sequences.py has 0.0940, 0.0894 and 0.0934 (mean 0.092, standard
           deviation 0.002), in twice as many epochs

HSTU is worse here than a model that knows the order alone; the reason was not looked for. Its
layers have no LayerNorm before them, which the other model's have, and the numbers below were
hardly tuned.
"""

seed = 0
epochs = 4
batch_size = 8  # histories

longest = 64  # events of a history; longer ones are cut into several
block = 64  # events of a block of attention
buckets = 32  # of the time between two events
dim = 48  # of the item vectors
heads = 2
layers = 2
init_scale = 0.1

learning_rate = 0.003  # Adam on table and network; falls to 0 along a cosine
beta_2 = 0.98
bias_rate = 1  # of the tables of biases, relative to the learning rate
