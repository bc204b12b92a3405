"""The data: a synthetic click log (every trainer process draws its own part; nothing here is called remotely).

One sample is a *bag* of 1 to 10 ids ("what this person looked at") and one of 8 classes ("what they clicked on").
As in the tutorial, a batch is one flat list of ids with the offset at which each bag begins.  Unlike there, the classes
are not dice: a hidden teacher of the model's own form gives each bag its class probabilities, and the class is drawn
from them.  So there is something to learn, and a ceiling: even the teacher cannot guess all of its own draws.

Shapes: B bags in a batch, I ids in a batch, N rows of the table (ids run from 0 to N - 1), D embedding dimensions,
C classes.
"""

import torch
from torch.nn import functional as F

NUM_CLASSES = 8
MAX_IDS_PER_BAG = 10
# How sure the teacher is: at 2 its best guess is right for about 73 % of the bags, so that noise and signal both show.
TEACHER_SHARPNESS = 2.0


class ClickLog:
    """An endless log of clicks: the same seeds give the same batches, whatever the number of trainers and servers."""

    def __init__(self, num_embeddings, embedding_dim, seed, targets="teacher"):
        """`targets` is "teacher", or "random" for the tutorial's own: classes that nothing in the bag can tell."""
        self.num_embeddings = num_embeddings
        self.targets = targets
        if targets == "teacher":
            generator = torch.Generator().manual_seed(seed)
            self.table_ND = torch.randn(num_embeddings, embedding_dim, generator=generator)
            weight_CD = torch.randn(NUM_CLASSES, embedding_dim, generator=generator)
            self.weight_CD = weight_CD * TEACHER_SHARPNESS / embedding_dim**0.5

    def teacher_logits(self, ids_I, offsets_B):
        """Return the teacher's logits [B, C]: an EmbeddingBag and a Linear layer, like the model that shall learn."""
        if self.targets == "random":
            return torch.zeros(len(offsets_B), NUM_CLASSES)  # every class is as likely as every other
        return F.embedding_bag(ids_I, self.table_ND, offsets_B, mode="sum") @ self.weight_CD.T

    def batches(self, num_batches, batch_bags, seed):
        """Return a list of (ids [I], offsets [B], target [B]), int64 on the CPU, each with exactly B = batch_bags bags.

        Every batch of the same size, whoever draws it: DDP averages the gradients of the trainers, not of the samples,
        so a trainer with 4 bags would weigh as much as one with 9.  (I still varies, as the bags do.)
        """
        generator = torch.Generator().manual_seed(seed)
        num_bags = num_batches * batch_bags
        # One draw for all batches: drawn one at a time, small batches would take longer to make than to train on.
        sizes = torch.randint(1, MAX_IDS_PER_BAG + 1, (num_bags,), generator=generator)
        ends = sizes.cumsum(0)
        starts = ends - sizes
        ids = torch.randint(0, self.num_embeddings, (int(ends[-1]),), generator=generator)
        probabilities = self.teacher_logits(ids, starts).softmax(dim=1)
        targets = torch.multinomial(probabilities, num_samples=1, generator=generator).squeeze(1)

        batches = []
        for first in range(0, num_bags, batch_bags):
            bags = slice(first, first + batch_bags)
            ids_I = ids[starts[first] : ends[first + batch_bags - 1]]
            batches.append((ids_I, starts[bags] - starts[first], targets[bags]))
        return batches
