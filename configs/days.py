"""A log of music in the order of the clock, with the network of DLRMv4 at a scale of one machine.

Command:   python examples/hstu/days.py
Hardware:  2 cores of an AMD EPYC, beside other work; JAX 0.10.2; 3.7 minutes with compilation
Expected:  AUC of the last day 0.8167 with seed 0; the true probabilities have 0.8393. First the
           quality of tracks is learned, up to about 0.64, then the tastes: with seed 1 that begins
           so late that the last day has 0.647

The numbers of the workload itself are in `dlrm_v4.py`.
"""

seed = 0

# The log.
days = 16
first_day = 4  # days before it only fill the histories
requests = 5_120  # a day
shown = 4  # candidates per request
flatness = 50.0  # of the tracks' popularity: 1 / (rank + flatness)
hidden = 1  # dimensions of tastes and styles
quality = 0.7  # the standard deviation of how much a track is liked by all, in the logit
strength = 2.0  # that of how much a user likes it
drift = 0.05  # the part of a taste's variance that a day replaces

# Tables and network.
rows = {"item": 400, "artist": 40, "album": 100, "user": 600, "hour": 24}
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
batch_size = 128  # requests
learning_rate = 0.1  # of row-wise Adagrad
epsilon = 1e-8  # of row-wise Adagrad
dense_learning_rate = 0.01  # of Adam
warm_up = 40  # steps
clip = 1.0  # the norm of the network's gradient
every = 20  # steps between checkpoints
