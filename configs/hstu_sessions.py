"""HSTU on made-up sessions in which order and time matter.

Command:   python examples/hstu/planted_sessions.py --devices 1
Hardware:  2 cores of an x86-64 CPU beside much other work; 40 s of processor time for each of two
           models; JAX 0.10.2
Expected:  after 500 steps NDCG@10 0.6150, 0.980 of the 0.6276 that the true probabilities have
           (0.951 of it after 250); without times 0.5373, 0.856 of it
"""

seed = 0
items = 50
steps = 500
batch_size = 32  # histories; a multiple of 8
tested = 400  # histories
every = 50  # steps between two points of the curve

longest = 128  # events of a history; the mean is a quarter of it
block = 64  # events of a block of attention
buckets = 16  # of the time between two events
dim = 48  # of the item vectors
heads = 4
layers = 2
norm_first = False  # no LayerNorm before a layer
init_scale = 0.1

learning_rate = 0.01  # Adam on table and network; falls to 0 along a cosine
bias_rate = 10  # of the tables of biases, relative to it
beta_2 = 0.98
