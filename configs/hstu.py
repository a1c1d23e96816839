"""HSTU layers with biases by position and time: the next films of MovieLens-100K.

Command:   python examples/hstu/next_film.py --devices 1
Hardware:  2 cores of an x86-64 CPU beside much other work, so no time is given; JAX 0.10.2
Expected:  NDCG@10 0.0868, 0.0902 and 0.0955 with the seeds 0 to 2 (mean 0.091, standard deviation
           0.004). The model of sequences.py, trained beside it, has 0.0940, 0.0894 and
           0.0934 (mean 0.092, standard deviation 0.002; sequences.py itself draws other numbers)

HSTU is no better here than a model that knows the order alone. Batch size, epochs and `norm_first`
were chosen among three by --validate, with the seed 0: NDCG@10 of the last rating but one is 0.0904
without a LayerNorm before each layer, in 4 epochs of batches of 8; 0.0972 with it, in 6 epochs of
batches of 16; 0.1006 in 8. The other numbers were hardly tuned.
"""

seed = 0
epochs = 8
batch_size = 16  # histories

longest = 64  # events of a history; longer ones are cut into several
block = 64  # events of a block of attention
buckets = 32  # of the time between two events
dim = 48  # of the item vectors
heads = 2
layers = 2
norm_first = True  # a LayerNorm before each layer
init_scale = 0.1

learning_rate = 0.003  # Adam on table and network; falls to 0 along a cosine
beta_2 = 0.98
bias_rate = 1  # of the tables of biases, relative to the learning rate
