"""HSTU layers with biases by position and time: next films, and made-up sessions."""

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
