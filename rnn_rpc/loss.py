"""Mode `loss`: as `logits`, but the server computes the loss: the targets go there, and one number comes back.

The backward pass needs no code of its own: the number is a tensor that needs a gradient, so distributed autograd goes
back through the call as it did through the call that returned the logits. `forward` is inherited from `logits`, for
Trainer.generate, which needs the scores.

Shapes: T = time steps, B = streams, E = embedding size, H = hidden size.
"""

import logits


class RNNModel(logits.RNNModel):  # in the trainer
    def summed_loss(self, input_TB, target_TB, hidden):
        emb_TBE = self.emb_table_rref.rpc_sync().forward(input_TB.cpu()).to(self.device)
        output_TBH, next_hidden = self.rnn(emb_TBE, hidden)
        loss = self.decoder_rref.rpc_sync().summed_loss(output_TBH.cpu(), target_TB.cpu()).to(self.device)
        return loss, next_hidden


class Decoder(logits.Decoder):  # on a server, on RPC threads
    def summed_loss(self, output_TBH, target_TB):
        """Return the cross entropy, summed over T * B, from the LSTM's output and the ids of the next tokens."""
        logits_TBV = self.decoder(self.drop(output_TBH.to(self.device)))  # forward() would copy them to the CPU
        return logits.summed_cross_entropy(logits_TBV, target_TB.to(self.device)).cpu()
