"""Amazon's reviews, the next item by SASRec with sampled softmax.

Command:   python examples/published/sasrec.py --data Beauty.txt    (or Toys_and_Games.txt)
Hardware:  one core of an x86-64 CPU, the other one busy; 7 and 6 minutes; JAX 0.10.2
Expected:  HR@10 0.090 and NDCG@10 0.053 on Beauty, 0.098 and 0.061 on Toys
           (examples/published/README.md)
"""

seed = 0
epochs = 80
patience = 3  # evaluations without a better NDCG@10 on the validation items, after which it ends
evaluate_every = 8  # epochs
batch_size = 128  # histories; a multiple of --devices

longest = 50  # events of a history
positions = False  # no vectors of positions beside the rows
dim = 64
heads = 1
blocks = 1
hidden = 64
dropout = 0.2
item_dropout = 0.2  # of the rows of items, as they enter the network and as it is compared to them
init_scale = 0.02

drawn = 1024  # items that are drawn for a batch
temperature = None  # inner products, not cosines
learning_rate = 2e-3  # Adam on table and network
decay = True  # to 0 along a cosine
beta_2 = 0.999
