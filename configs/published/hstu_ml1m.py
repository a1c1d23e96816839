"""MovieLens-1M, the next film by HSTU.

Command:   python examples/published/ml1m_hstu.py --data ratings.dat
Hardware:  not run yet
Expected:  published are HR@10 0.3097 and NDCG@10 0.1720, with another order of events of one
           time (github.com/meta-recsys/generative-recommenders, "HSTU")

The numbers are those of the authors' config, but for `drawn`: theirs draws 128 films for each
event, here a batch has 1,024 for all its events.
"""

seed = 0
epochs = 101
batch_size = 128  # histories

longest = 200  # events of a history
positions = True  # a vector for each, beside the rows
dim = 50
heads = 1
blocks = 2
buckets = 128  # of the time between two events
dropout = 0.2
item_dropout = 0.0
init_scale = 0.02

drawn = 1024  # films that are drawn for a batch
temperature = 0.05  # of cosines
learning_rate = 1e-3  # Adam on table and network
decay = False
beta_2 = 0.98
