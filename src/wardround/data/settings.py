"""The `data:` section of a run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import Field, model_validator

from wardround.data.phantom.cases import PhantomSettings
from wardround.data.serving.resident import Oversampling
from wardround.settings import Settings

TRAVELLING = (
    "prepare",
    "patch",
    "foreground",
    "foreground_by",
    "common",
)  # what hospitals are told of `data`


class CommonSettings(Settings):
    """Names that all hospitals of a run use, in this order, whatever their own files say.

    classes: without the background; channels: of an image, empty where they stay as they are.
    """

    classes: tuple[Annotated[str, Field(min_length=1, max_length=200)], ...] = Field(
        min_length=1, max_length=255
    )
    channels: tuple[Annotated[str, Field(min_length=1, max_length=200)], ...] = Field((), max_length=64)


class DataSettings(Settings):
    """Where the cases come from: a federation.yaml, or synthetic hospitals.

    prepare, splits: settings laid over those of federation.yaml, such as {size: [128, 128]}; patch: voxels
    of the parts of volumes that are trained on, null takes whole images where they have one shape;
    foreground: share of patches around something labelled, of each class present equally often.
    """

    phantom: PhantomSettings = PhantomSettings()
    federation: Path | None = Field(
        None, description="federation.yaml of real data, relative to the current directory"
    )
    hospitals: bool = Field(
        False, description="cases are at the hospitals, each with its own federation.yaml: wardround submit"
    )
    in_memory: bool | dict[str, str] = Field(
        False,
        description="cases are handed over in Python: wr.run(config, data={client: cases}); a run writes "
        "down what each client had",
    )
    prepare: dict[str, Any] | None = None
    splits: dict[str, Any] | None = None
    common: CommonSettings | None = Field(
        None, description="names of classes and channels that hospitals agreed on, as `survey` proposes them"
    )
    patch: tuple[Annotated[int, Field(ge=1)], ...] | None = None
    foreground: float = Field(0.5, ge=0, le=1)
    foreground_by: Oversampling = Field(
        "patch",
        description="patch: each by chance; batch: that share of every batch, rounded up, so always one",
    )
    test: bool = Field(
        True,
        description="false: test cases are not opened, and nothing is tested; for choices before a final run",
    )
    proxy: str | None = Field(
        None, description="centre whose cases are at the server, for methods that need some; not a client"
    )

    @model_validator(mode="before")
    @classmethod
    def drop_folders(cls, values: Any) -> Any:
        """Accept the `folders: null` of run folders written before; say what to do about any other value."""
        if not isinstance(values, Mapping) or "folders" not in values:
            return values
        if values["folders"] is not None:
            raise ValueError(
                "data.folders is no longer read. Write a federation.yaml with: wardround data init FOLDER "
                "-o federation.yaml; then set data.federation to it"
            )
        return {name: value for name, value in values.items() if name != "folders"}

    @model_validator(mode="after")
    def one_source(self) -> Self:
        given = {
            "phantom": self.phantom != PhantomSettings(),
            "federation": self.federation is not None,
            "hospitals": self.hospitals,
            "in_memory": bool(self.in_memory),
        }
        named = [name for name, is_given in given.items() if is_given]
        if len(named) > 1:
            raise ValueError(
                f"{' and '.join(named)} are both given, but cases come from one. Keep that alone, "
                f"for example data: {{{named[-1]}: ...}}"
            )
        if self.splits is not None and self.hospitals:
            raise ValueError(
                "splits are each hospital's own decision. Leave data.splits out, and let hospitals set them "
                "in federation.yaml or site.yaml"
            )
        if self.common is not None and not self.hospitals:
            raise ValueError(
                "common names are agreed on by hospitals; here, name labels and channels in federation.yaml"
            )
        for name in ("prepare", "splits", "patch"):
            if getattr(self, name) is not None and self.federation is None and not self.hospitals:
                raise ValueError(f"{name} needs real data: set data.federation to a federation.yaml")
        if self.patch is not None and len(self.patch) not in (2, 3):
            raise ValueError(f"patch is {list(self.patch)}; give two numbers for images, three for volumes")
        return self

    @property
    def is_phantom(self) -> bool:
        """Whether synthetic hospitals are asked for, rather than the default of settings without data."""
        return self.phantom != PhantomSettings()

    @property
    def dimensions(self) -> int | None:
        """2 or 3 where the settings alone say it."""
        if self.is_phantom:
            return self.phantom.dimensions
        return None if self.patch is None else len(self.patch)
