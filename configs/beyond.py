"""A table on the host, of twenty times the rows that the devices hold, beside the same on them.

Command:   python examples/beyond.py --devices 1    (or 8)
Hardware:  2 cores of an x86-64 CPU, shared with others; 10 to 18 s on 1 device, 18 s on 8
Expected:  error 0.08729 in the first window and 0.03725 in the last, on 1 and 8 devices, with the
           same bits for both tables; 330,336 rows at home take 182 MB; of the distinct rows of a
           batch 48 % need not be moved in the last window. With --path DIR --limit 64 the first run
           alone, with the same errors; with --limit 64 and no path it ends with a MemoryError.
"""

seed = 0  # of the problem and of the initial values

# The problem: a bag of items has the mean of their qualities, and noise
rows = 400_000  # V
flatness = 50  # the item of rank r, from 0, comes with a frequency in proportion to 1 / (r + 50)
batches = 800
batch_size = 512  # bags; a multiple of 8
bag = 8  # items
noise = 0.1  # standard deviation; its square is the least error that can be had

# The model
dim = 64
device_rows = 20_000  # C, a twentieth of V
evict = "lru"
learning_rate = 0.03  # Adagrad
initial_accumulator = 0.1
window = 100  # batches, whose mean error is a point of the curves
