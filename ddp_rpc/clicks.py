"""The data: a synthetic log of clicks.

Runs in the trainer processes. Each trainer draws its own part of the log, and no function of this file is called over
RPC.

One sample is a *bag* of 1 to 10 ids (what a person looked at) and one of 8 classes (what the person clicked on). As
in the tutorial, a batch is a flat list of ids, with the offset at which each bag begins. In the tutorial the classes
are random. In this program a hidden *teacher*, a model of the same form as the one that is trained, computes
probabilities of the classes for each bag, and the class is drawn from these probabilities. So a model can learn them.
The highest accuracy to expect is that of the teacher, whose most probable class is not always the one that was drawn.

Shapes: B bags in a batch, I ids in a batch, N rows of the table (ids run from 0 to N - 1), D embedding dimensions,
C classes.
"""

import torch
import torch.nn.functional as F

NUM_CLASSES = 8
MAX_IDS_PER_BAG = 10
# A factor of the teacher's logits. With 2, the most probable class is right for about 73 % of the bags.
TEACHER_SHARPNESS = 2.0


class ClickLog:
    """An endless log of clicks. The same seeds give the same batches, for any number of trainers and servers."""

    def __init__(self, num_embeddings, embedding_dim, seed, targets="teacher"):
        """`targets` is "teacher", or "random" for the tutorial's targets, which do not depend on the bag."""
        self.num_embeddings = num_embeddings
        self.targets = targets
        if targets == "teacher":
            generator = torch.Generator().manual_seed(seed)
            self.table_ND = torch.randn(num_embeddings, embedding_dim, generator=generator)
            weight_CD = torch.randn(NUM_CLASSES, embedding_dim, generator=generator)
            self.weight_CD = weight_CD * TEACHER_SHARPNESS / embedding_dim**0.5

    def batches(self, num_batches, batch_bags, seed):
        """Return a list of batches (ids (I), offsets (B), target (B)), int64 on the CPU.

        Each batch has exactly B = batch_bags bags, but I varies. The reason: DDP takes the mean over the trainers, not
        over the bags. If the batches had different sizes, the 4 bags of one trainer would together weigh as much as
        the 9 bags of another.
        """
        generator = torch.Generator().manual_seed(seed)
        num_bags = num_batches * batch_bags
        # Draw all batches at once. Drawing small batches one at a time would take longer than training on them.
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

    def teacher_logits(self, ids_I, offsets_B):
        """Return the teacher's logits (B, C): an EmbeddingBag and a Linear layer, like the model that is trained."""
        if self.targets == "random":
            return torch.zeros(len(offsets_B), NUM_CLASSES)  # all classes have the same probability
        return F.embedding_bag(ids_I, self.table_ND, offsets_B, mode="sum") @ self.weight_CD.T
