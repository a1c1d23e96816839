"""A log of music in the order of the clock, with the network of DLRMv4 at a scale of one machine.

Command:   python examples/hstu/days.py
Hardware:  2 cores
Expected:  to be measured

The numbers of the workload itself are in `dlrm_v4.py`.
"""

seed = 0

# The log.
days = 16
first_day = 4  # days before it only fill the histories
requests = 5_120  # a day
shown = 4  # candidates per request
flatness = 50.0  # of the tracks' popularity: 1 / (rank + flatness)
hidden = 2  # dimensions of tastes and styles
quality = 0.7  # the standard deviation of how much a track is liked by all, in the logit
strength = 1.5  # that of how much a user likes it
drift = 0.05  # the part of a taste's variance that a day replaces

# Tables and network.
rows = {"item": 2_000, "artist": 200, "album": 600, "user": 1_500, "hour": 24}
histories = ("item", "artist", "album")
contexts = ("user", "hour")
dim = 16
longest = 64  # events of a history
width = 32
heads = 2
key_dim = 16
value_dim = 16
layers = 2
hidden_size = 32
action_dim = 8
positions = 128
ages = 512
block = 32
dtype = "float32"

# Training.
batch_size = 256  # requests
learning_rate = 0.02  # of row-wise Adagrad
epsilon = 1e-8  # of row-wise Adagrad
dense_learning_rate = 0.003  # of Adam
warm_up = 50  # steps
clip = 1.0  # the norm of the network's gradient
every = 20  # steps between checkpoints
