"""A small language model of characters, without and with a memory of n-grams.

Command:   python examples/memory_lm/train.py --text tiny_shakespeare.txt
Hardware:  2 cores of an x86-64 CPU, shared with others; 5 minutes
Expected:  held-out loss 1.8639 without a memory and 1.6997 with one, seed 0;
           means of three seeds 1.8685 and 1.6928
"""

seed = 0  # of the initial values and of the order of the text

# The network, as nanoGPT's README trains it on a CPU
layers = 4
heads = 4
width = 128
block = 64  # characters that it sees

# Its training
batch_size = 12  # blocks
sum_blocks = 4  # G, in which gradients are summed; it divides the batch
micro_batches = 3  # parts of a batch, one after the other
steps = 2000
warm_up = 100  # steps
learning_rate = 1e-3  # at the top
last_learning_rate = 1e-4
beta_2 = 0.99
weight_decay = 0.1  # of matrices
clip = 1.0  # norm of the gradients

# The memory
orders = (2, 3)  # characters of an n-gram
memory_heads = 8  # ids of each order
memory_layer = 1  # before which it is added, from 0
memory_rows = 1_000_000
memory_dim = 16
device_rows = 50_000  # a twentieth of them
memory_rate = 0.05  # learning rate of RowWiseAdagrad
initial_accumulator = 1e-8  # small beside squared gradients, which are those of a mean loss

evaluate_every = 500  # steps
