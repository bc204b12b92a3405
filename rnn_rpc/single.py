"""The same training as in tutorial.py, in one process: `diff single.py tutorial.py` shows what RPC
adds. Both print the same lines, with nearly the same numbers: here one random generator draws all
weights, there each process draws its own.

    python single.py
    CUDA_VISIBLE_DEVICES= python single.py    # hides CUDA GPUs: all stays on the CPU

Part 2 of PyTorch's tutorial "Getting Started with Distributed RPC Framework", without RPC.
"Difference 7" is number 7 in docs/differences/rnn_rpc.md.
"""

import argparse

import torch
from torch import nn, optim

# Shapes, with the tutorial's names: T time steps (`batch`), B streams, which are parts of the text
# read side by side (`nindices`), E and H vector sizes (`ninp`, `nhid`), V words (`ntoken`).


class EmbeddingTable(nn.Module):
    """From the number of a word to its vector."""

    def __init__(self, ntoken, ninp, dropout):
        super().__init__()
        # The table is on a GPU if this process has one. Everything else is on the CPU.
        self.device = torch.accelerator.current_accelerator(check_available=True) or "cpu"
        self.drop = nn.Dropout(dropout)
        self.encoder = nn.Embedding(ntoken, ninp)
        nn.init.uniform_(self.encoder.weight, -0.1, 0.1)  # on the CPU: the same on every device
        self.encoder.to(self.device)

    def forward(self, input):  # (T, B) -> (T, B, E)
        return self.drop(self.encoder(input.to(self.device))).cpu()


class Decoder(nn.Module):
    """From an output of the LSTM to a score for each word."""

    def __init__(self, ntoken, nhid, dropout):
        super().__init__()
        self.drop = nn.Dropout(dropout)
        self.decoder = nn.Linear(nhid, ntoken)
        nn.init.zeros_(self.decoder.bias)
        nn.init.uniform_(self.decoder.weight, -0.1, 0.1)

    def forward(self, output):  # (T, B, H) -> (T, B, V)
        return self.decoder(self.drop(output))


class RNNModel(nn.Module):
    """The three parts are those of word_language_model in pytorch/examples."""

    def __init__(self, ntoken, ninp, nhid, nlayers, dropout=0.5):
        super().__init__()
        self.emb_table = EmbeddingTable(ntoken, ninp, dropout)
        self.rnn = nn.LSTM(ninp, nhid, nlayers, dropout=dropout)
        self.decoder = Decoder(ntoken, nhid, dropout)

    def forward(self, input, hidden):
        emb = self.emb_table(input)  # (T, B, E)
        output, hidden = self.rnn(emb, hidden)  # (T, B, H)
        decoded = self.decoder(output)  # (T, B, V)
        return decoded, hidden


def run_trainer():
    batch = 20  # T, the time steps: the name is the tutorial's
    ntoken = 10
    ninp = 16

    nhid = 32
    nindices = 20
    nlayers = 1
    num_batches = 160  # of an epoch
    hidden = (torch.randn(nlayers, nindices, nhid), torch.randn(nlayers, nindices, nhid))

    # Dropout prevents a model from memorizing a text. This text never repeats, so dropout is off.
    model = RNNModel(ntoken, ninp, nhid, nlayers, dropout=0.0)

    opt = optim.SGD(model.parameters(), lr=2.0)

    criterion = torch.nn.CrossEntropyLoss()

    # The text: each word is the sum, modulo 10, of the word two places before it and a random
    # number. Of these numbers, 0 is the most likely. No model can foresee them.
    prob = torch.softmax(-torch.arange(float(ntoken)), dim=0)
    lowest = torch.exp(-(prob * prob.log()).sum())  # perplexity is exp(loss): here exp(entropy)

    def get_next_batch():
        words = list(torch.randint(ntoken, (2, nindices)))
        for _ in range(num_batches):
            for _ in range(batch):
                number = torch.multinomial(prob, nindices, replacement=True)
                words.append((words[-2] + number) % ntoken)
            text = torch.stack(words[-batch - 1 :])
            yield text[:-1], text[1:]  # data and target (T, B): the target is the next word

    for epoch in range(10):
        total_loss = 0.0
        for data, target in get_next_batch():
            # Continue from the last batch, but not its graph.
            hidden[0].detach_()
            hidden[1].detach_()
            output, hidden = model(data, hidden)
            loss = criterion(output.flatten(0, 1), target.flatten())  # difference 4
            opt.zero_grad()
            loss.backward()
            opt.step()
            total_loss += loss.detach()
        perplexity = torch.exp(total_loss / num_batches)
        print(f"Training epoch {epoch}: perplexity {perplexity:.3f} (lowest possible {lowest:.3f})")


def parse_args():
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=1, help="of all random numbers (1)")
    return parser.parse_args()


if __name__ == "__main__":
    args = parse_args()
    torch.set_num_threads(1)  # such small operations are slower with more threads
    torch.manual_seed(args.seed)
    run_trainer()
