//! Finding a model by name, and reading one from a file.

use std::sync::OnceLock;

use serde::Deserialize;

use super::{Experts, Feed, Mixer, Model, ModelError, Stack};

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Catalogue {
    models: Vec<Model>,
}

/// More than any description needs.
const MAX_FILE_BYTES: usize = 1 << 20;
/// Wider, deeper or more numerous than anything that will be built soon; products of a few of these fit into an f64 exactly enough.
const MAX_SIZE: u32 = 1 << 24;

impl Model {
    /// The models that are described in this program.
    pub fn catalogue() -> &'static [Model] {
        static MODELS: OnceLock<Vec<Model>> = OnceLock::new();
        MODELS.get_or_init(|| {
            let catalogue: Catalogue =
                toml::from_str(include_str!("catalogue.toml")).expect("the embedded catalogue parses");
            for model in &catalogue.models {
                model.validate().expect("the embedded models hold together");
            }
            catalogue.models
        })
    }

    /// Finds a model by any of its names; case, spaces and punctuation do not matter, nor does the owner before a slash. A GPT can be
    /// described in its name: `GPT h12288 L96 a96`, and another model cut to some layers: `… proxy 8 layers`.
    pub fn named(name: &str) -> Result<Model, ModelError> {
        if let Some(model) = gpt_by_shape(name) {
            model.validate()?;
            return Ok(model);
        }
        let (base, layers) = cut_to(name);
        let wanted = plain(base);
        let found = Model::catalogue()
            .iter()
            .find(|model| model.names().any(|name| plain(name) == wanted));
        match (found, layers) {
            (Some(model), None) => Ok(model.clone()),
            (Some(model), Some(layers)) => model.with_layers(layers),
            (None, _) => Err(ModelError::Unknown {
                name: name.chars().take(80).collect(),
                closest: closest(&wanted),
            }),
        }
    }

    /// Reads one model from TOML.
    pub fn from_toml(text: &str) -> Result<Model, ModelError> {
        if text.len() > MAX_FILE_BYTES {
            return Err(ModelError::TooLong {
                bytes: text.len(),
                max: MAX_FILE_BYTES,
            });
        }
        let model: Model = toml::from_str(text).map_err(|error| ModelError::Syntax(error.to_string()))?;
        model.validate()?;
        Ok(model)
    }

    /// The file that [`Model::from_toml`] reads back as this model.
    pub fn to_toml(&self) -> String {
        toml::to_string(self).expect("every field of a model has a form in TOML")
    }

    pub fn names(&self) -> impl Iterator<Item = &str> {
        std::iter::once(self.name.as_str()).chain(self.aliases.iter().map(String::as_str))
    }

    /// The same model with another number of layers, its stacks cut in proportion.
    pub fn with_layers(&self, layers: u32) -> Result<Model, ModelError> {
        let total = u64::from(self.layers());
        let mut cut = self.clone();
        cut.name = format!("{} ({layers} layers)", self.name);
        cut.published = None;
        cut.published_active = None;
        let (mut before, mut given) = (0u64, 0u64);
        for stack in &mut cut.stacks {
            before += u64::from(stack.layers);
            let upto = before * u64::from(layers) / total.max(1);
            stack.layers = (upto - given) as u32;
            given = upto;
        }
        cut.stacks.retain(|stack| stack.layers > 0);
        cut.validate()?;
        Ok(cut)
    }

    /// Checks that every number is possible and that what must divide divides.
    pub fn validate(&self) -> Result<(), ModelError> {
        if self.stacks.iter().all(|stack| stack.layers == 0) {
            return Err(ModelError::NoLayers {
                model: self.name.clone(),
            });
        }
        self.bounded("hidden", self.hidden, 1)?;
        self.bounded("vocabulary", self.vocabulary, 1)?;
        self.bounded("positions", self.positions, 0)?;
        self.bounded("predictors", self.predictors, 0)?;
        for stack in &self.stacks {
            self.bounded("layers", stack.layers, 1)?;
            if let Some(mixer) = &stack.mixer {
                self.validate_mixer(mixer)?;
            }
            match &stack.feed {
                Some(Feed::Dense { inner, .. }) => self.bounded("inner", *inner, 1)?,
                Some(Feed::Experts(experts)) => self.validate_experts(experts)?,
                None => {}
            }
        }
        Ok(())
    }

    fn validate_mixer(&self, mixer: &Mixer) -> Result<(), ModelError> {
        match *mixer {
            Mixer::Attention {
                heads,
                kv_heads,
                head,
                window,
                narrow,
                ..
            } => {
                for (field, value) in [("heads", heads), ("kv_heads", kv_heads), ("head", head)] {
                    self.bounded(field, value, 1)?;
                }
                self.bounded("window", window.unwrap_or(1), 1)?;
                if let Some(narrow) = narrow {
                    self.bounded("narrow.query", narrow.query, 1)?;
                    self.bounded("narrow.output", narrow.output, 1)?;
                    self.divides("narrow.groups", narrow.groups, heads)?;
                }
                self.divides("kv_heads", kv_heads, heads)
            }
            Mixer::Latent {
                heads,
                query_rank,
                kv_rank,
                nope,
                rope,
                value,
            } => {
                for (field, value) in [
                    ("heads", heads),
                    ("query_rank", query_rank),
                    ("kv_rank", kv_rank),
                    ("nope", nope),
                    ("rope", rope),
                    ("value", value),
                ] {
                    self.bounded(field, value, 1)?;
                }
                Ok(())
            }
            Mixer::StateSpace {
                heads,
                head,
                state,
                groups,
            } => {
                for (field, value) in [("heads", heads), ("head", head), ("state", state)] {
                    self.bounded(field, value, 1)?;
                }
                self.divides("groups", groups, heads)
            }
            Mixer::Delta {
                key_heads,
                value_heads,
                key,
                value,
            } => {
                for (field, value) in [("value_heads", value_heads), ("key", key), ("value", value)] {
                    self.bounded(field, value, 1)?;
                }
                self.divides("key_heads", key_heads, value_heads)
            }
        }
    }

    fn validate_experts(&self, experts: &Experts) -> Result<(), ModelError> {
        self.bounded("experts", experts.experts, 1)?;
        self.bounded("inner", experts.inner, 1)?;
        self.bounded("shared", experts.shared, 0)?;
        self.bounded("latent", experts.latent.unwrap_or(1), 1)?;
        if experts.chosen < 1 || experts.chosen > experts.experts {
            return Err(ModelError::OutOfRange {
                model: self.name.clone(),
                field: "chosen",
                value: experts.chosen,
                least: 1,
                most: experts.experts,
            });
        }
        Ok(())
    }

    fn bounded(&self, field: &'static str, value: u32, least: u32) -> Result<(), ModelError> {
        if (least..=MAX_SIZE).contains(&value) {
            return Ok(());
        }
        Err(ModelError::OutOfRange {
            model: self.name.clone(),
            field,
            value,
            least,
            most: MAX_SIZE,
        })
    }

    fn divides(&self, what: &'static str, part: u32, whole: u32) -> Result<(), ModelError> {
        if part > 0 && whole.is_multiple_of(part) {
            return Ok(());
        }
        Err(ModelError::Indivisible {
            model: self.name.clone(),
            what,
            part,
            whole,
        })
    }
}

/// Reads `GPT h2304 L24 a24`: widths of heads are 128 where the number of heads is not given, and the inner width is four times the hidden.
fn gpt_by_shape(name: &str) -> Option<Model> {
    let mut words = name.split_whitespace();
    if !words.next()?.eq_ignore_ascii_case("gpt") {
        return None;
    }
    let (mut hidden, mut layers, mut heads) = (None, None, None);
    for word in words {
        let field = match word.chars().next()? {
            'h' => &mut hidden,
            'L' => &mut layers,
            'a' => &mut heads,
            _ => continue,
        };
        *field = word[1..].parse::<u32>().ok();
    }
    let (hidden, layers) = (hidden?, layers?);
    let heads = heads.unwrap_or(hidden.div_ceil(128)).max(1);
    Some(Model {
        name: name.to_owned(),
        aliases: Vec::new(),
        hidden,
        vocabulary: 51_200,
        tied: true,
        positions: 2048,
        stacks: vec![Stack {
            layers,
            mixer: Some(Mixer::Attention {
                heads,
                kv_heads: heads,
                head: hidden / heads,
                window: None,
                narrow: None,
                gated: false,
            }),
            feed: Some(Feed::Dense {
                inner: hidden.saturating_mul(4),
                gated: false,
            }),
        }],
        predictors: 0,
        published: None,
        published_active: None,
    })
}

/// Splits `Llama-3.1 405B proxy 8 layers` into the model and its number of layers.
fn cut_to(name: &str) -> (&str, Option<u32>) {
    let Some((base, rest)) = name.split_once(" proxy ") else {
        return (name, None);
    };
    match rest.strip_suffix(" layers").and_then(|layers| layers.parse().ok()) {
        Some(layers) => (base, Some(layers)),
        None => (name, None),
    }
}

/// The letters and digits of a name, without its owner and without what stands in brackets.
fn plain(name: &str) -> String {
    let name = name.split('(').next().unwrap_or(name);
    let name = name.rsplit('/').next().unwrap_or(name);
    name.chars()
        .filter(char::is_ascii_alphanumeric)
        .map(|c| c.to_ascii_lowercase())
        .collect()
}

/// The names that share the longest beginning with what was asked for.
fn closest(wanted: &str) -> Vec<String> {
    let common = |name: &str| {
        plain(name)
            .chars()
            .zip(wanted.chars())
            .take_while(|(a, b)| a == b)
            .count()
    };
    let mut names: Vec<&str> = Model::catalogue().iter().map(|model| model.name.as_str()).collect();
    names.sort_by_key(|name| std::cmp::Reverse(common(name)));
    names.into_iter().take(3).map(str::to_owned).collect()
}
