"""A GAN on handwritten digits: two models, two optimizers, and noise that differs between workers.

    echelon run --workers 4 examples/gan.py --epochs 30

Generator and discriminator are prepared in one call; each optimizer steps on the gradients of the global
batch. After `prepare` every worker draws random numbers of its own, so four workers draw four times as much
noise.
"""

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import echelon

NOISE = 32


def picture(image: torch.Tensor) -> str:
    """An 8 x 8 image in characters."""
    shades = " .:-=+*#%@"
    return "\n".join(
        "".join(shades[int(v * 9.999)] * 2 for v in row) for row in image.clamp(0, 1).view(8, 8)
    )


def main() -> None:
    """The whole script."""
    options = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    options.add_argument("--epochs", type=int, default=20)
    given = options.parse_args()

    session = echelon.join()
    torch.manual_seed(0)
    images = torch.from_numpy(load_digits().images).float().flatten(1) / 16
    generator = nn.Sequential(
        nn.Linear(NOISE, 128),
        nn.LeakyReLU(0.2),
        nn.Linear(128, 128),
        nn.LeakyReLU(0.2),
        nn.Linear(128, 64),
        nn.Sigmoid(),
    )
    discriminator = nn.Sequential(nn.Linear(64, 128), nn.LeakyReLU(0.2), nn.Dropout(0.3), nn.Linear(128, 1))
    improve_generator = torch.optim.Adam(generator.parameters(), lr=1e-3, betas=(0.5, 0.999))
    improve_discriminator = torch.optim.Adam(discriminator.parameters(), lr=1e-3, betas=(0.5, 0.999))
    loader = DataLoader(TensorDataset(images), batch_size=64, shuffle=True)
    generator, discriminator, improve_generator, improve_discriminator, loader = session.prepare(
        generator, discriminator, improve_generator, improve_discriminator, loader
    )
    judge = nn.functional.binary_cross_entropy_with_logits
    for epoch in session.epochs(given.epochs):
        for (real,) in loader:
            fake = generator(torch.randn(len(real), NOISE))
            on_real, on_fake = discriminator(real), discriminator(fake.detach())
            loss_d = judge(on_real, torch.full_like(on_real, 0.9)) + judge(
                on_fake, torch.zeros_like(on_fake)
            )
            improve_discriminator.zero_grad()
            loss_d.backward()
            improve_discriminator.step()

            discriminator.requires_grad_(False)  # the generator's pass needs no gradients of it
            on_fake = discriminator(fake)
            loss_g = judge(on_fake, torch.ones_like(on_fake))
            improve_generator.zero_grad()
            loss_g.backward()
            improve_generator.step()
            discriminator.requires_grad_(True)
            session.log(loss=loss_g, discriminator=loss_d)
        if session.is_leader and (epoch + 1) % 10 == 0:
            print(
                f"epoch {epoch}: generator {loss_g.item():.2f}, discriminator {loss_d.item():.2f}",
                flush=True,
            )
    if session.is_leader:
        with torch.no_grad():
            print(picture(generator(torch.randn(1, NOISE))[0]))


if __name__ == "__main__":
    main()
