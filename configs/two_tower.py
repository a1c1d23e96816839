"""MovieLens-100K, retrieval by two towers and in-batch softmax.

Command:   python examples/two_tower.py --devices 1    (or 8)
Hardware:  2 cores of an x86-64 CPU; 9 s on 1 device, 27 s on 8, compilation included
Expected:  recall@50 0.544 after 8 epochs, by popularity 0.301; 0.540 to 0.548 with --seed 0 to 2;
           losses on 1 and 8 devices agree to 1e-4, recall to 0.001 (sums are rounded differently)
           With --leave-one-out, NDCG@10 0.062, 0.068 and 0.066 with --seed 0 to 2; recall@10 0.122
           to 0.132. By popularity 0.045 and 0.086
"""

seed = 0  # of the 80/20 split, the initial values and the order of the batches
epochs = 8
batch_size = 1600  # divides the 80,000 training ratings; a multiple of 8

dim = 32  # of the user and item vectors
side_dim = 8  # of age, gender, occupation, genres and decade
hidden = 64
init_scale = 0.1

learning_rate = 0.1  # Adagrad on the tables; falls to 0 along a cosine
dense_learning_rate = 0.002  # Adam on the towers
temperature = 0.2  # of the softmax over cosines
