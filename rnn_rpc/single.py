"""tutorial.py in one process, without RPC.  `diff single.py tutorial.py` shows what RPC adds."""

import argparse

import torch
from torch import nn, optim


class EmbeddingTable(nn.Module):
    def __init__(self, ntoken, ninp, seed):
        super().__init__()
        self.encoder = nn.utils.skip_init(nn.Embedding, ntoken, ninp)
        nn.init.uniform_(self.encoder.weight, -0.1, 0.1, torch.Generator().manual_seed(seed))

    def forward(self, input):
        return self.encoder(input)


class Decoder(nn.Module):
    def __init__(self, ntoken, nhid, seed):
        super().__init__()
        self.decoder = nn.utils.skip_init(nn.Linear, nhid, ntoken)
        nn.init.zeros_(self.decoder.bias)
        nn.init.uniform_(self.decoder.weight, -0.1, 0.1, torch.Generator().manual_seed(seed))

    def forward(self, output):
        return self.decoder(output)


class RNNModel(nn.Module):
    def __init__(self, ntoken, ninp, nhid, nlayers):
        super().__init__()
        table_seed, decoder_seed = torch.randint(2**31, (2,)).tolist()
        self.emb_table = EmbeddingTable(ntoken, ninp, table_seed)
        self.rnn = nn.LSTM(ninp, nhid, nlayers)
        self.decoder = Decoder(ntoken, nhid, decoder_seed)

    def forward(self, input, hidden):
        emb = self.emb_table(input)  # (T, B, E)
        output, hidden = self.rnn(emb, hidden)  # (T, B, H)
        return self.decoder(output), hidden  # (T, B, V)


def get_next_batch(prob, T, B, nbatches):
    """Yield nbatches pairs (data, target), each (T, B).  A word's target is the next word."""
    words = list(torch.randint(len(prob), (2, B)))
    while len(words) <= T * nbatches:
        words.append((words[-2] + torch.multinomial(prob, B, replacement=True)) % len(prob))
    text = torch.stack(words)
    yield from zip(text[:-1].split(T), text[1:].split(T), strict=True)


def run_trainer(seed):
    torch.manual_seed(seed)
    prob = torch.softmax(-torch.arange(10.0), dim=0)
    lowest = torch.exp(-(prob * prob.log()).sum())
    heldout_data, heldout_target = next(get_next_batch(prob, T=1000, B=20, nbatches=1))
    model = RNNModel(ntoken=10, ninp=16, nhid=32, nlayers=1)
    opt = optim.SGD(model.parameters(), lr=2.0)
    criterion = nn.CrossEntropyLoss()
    for epoch in range(8):
        hidden = None  # the LSTM's state starts at zero
        for data, target in get_next_batch(prob, T=20, B=20, nbatches=200):
            output, hidden = model(data, hidden)
            loss = criterion(output.flatten(0, 1), target.flatten())
            opt.zero_grad()
            loss.backward()
            opt.step()
            hidden = (hidden[0].detach(), hidden[1].detach())
        with torch.no_grad():
            output, _ = model(heldout_data, None)
            loss = criterion(output.flatten(0, 1), heldout_target.flatten())
        print(f"Training epoch {epoch}: perplexity {loss.exp():.3f} (lowest possible {lowest:.3f})")


if __name__ == "__main__":
    torch.set_num_threads(1)
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=1, help="seed of all random numbers")
    run_trainer(parser.parse_args().seed)
