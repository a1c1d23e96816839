"""MovieLens-100K, the next film of each user by HSTU layers over jagged histories.

Command:   python examples/sequences.py --devices 1    (or 8)
Hardware:  2 cores of an x86-64 CPU; 43 s on 1 device, 58 s on 8, with compilation
Expected:  NDCG@10 0.095, 0.091 and 0.094 with --seed 0 to 2 (standard deviation 0.002), recall@10
           0.172 to 0.191, over all films but those that a user has rated before. The two towers
           (two_tower.py --leave-one-out) have NDCG@10 0.061, 0.068 and 0.066, popularity 0.045.
           Losses on 1 and 8 devices agree to 0.001, NDCG@10 to 0.003 (sums are rounded differently)

The hyperparameters were chosen on the last rating but one, with the last one left out.
"""

seed = 0  # of the initial values, and of where histories are cut
epochs = 8
batch_size = 32  # histories; a multiple of 8

longest = 31  # events of a history; longer ones are cut into several
dim = 48  # of the item vectors
heads = 2
layers = 2
init_scale = 0.1

learning_rate = 0.003  # Adam on table and network; falls to 0 along a cosine
beta_2 = 0.98
